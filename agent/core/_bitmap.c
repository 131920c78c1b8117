/* Bitmap, an immutable set of the ids 0..1023 (CPUs or NUMA nodes).

   Mirrors _bitmap_py.py, which is the definition: results, hashes, pickles and error texts are the
   same, and one test suite runs on both. What a method means is written there.

   Structure. A Bitmap is a Python object with 16 words of 64 bits inline: one allocation of
   144 bytes, no pointer to follow. Id i is bit i % 64 of word i / 64.

   There are four layers, each of which uses only those above it:

     Bits      in _bits.h: sets as plain C values; no Python, nothing can fail
     numbers   Python's ints to ids and bits, and back
     texts     the kernel's list and mask texts to Bits, and back
     Bitmap    the type: unwraps its arguments, calls one of the above, wraps the result

   The module's functions, which search, are in _search.c.

   Invariants. The words never change once a Bitmap is handed out, so nothing needs a lock. The
   type cannot be inherited from, so two Bitmaps have the same Py_TYPE, and a method finds the type
   as Py_TYPE(self); the module's functions find it in the module's state. Interpreters share
   nothing but constants.

   Cost. Algebra, relations, len and hash run over 16 words whatever the set: tens of nanoseconds,
   most of them spent on the object. Reading a text takes time linear in its length, whatever it
   holds. Iteration makes the ints of all members at once. */

#include "_bits.h"

#define TOO_LARGE "is over 1023, the largest that numalet handles"

/* ---- numbers --------------------------------------------------------------------------------- */

#define BYTES (WORDS * 8)
#define SHOWN_BITS 128

void raise_type(const char *format, PyObject *object)
{
    PyObject *name = PyType_GetName(Py_TYPE(object));
    if (name != NULL)
        PyErr_Format(PyExc_TypeError, format, name);
    Py_XDECREF(name);
}

/* -1 for any negative int, MAX_ID + 1 for any over MAX_ID. */
static int clamp_number(PyObject *number)
{
    int overflow;
    long value = PyLong_AsLongAndOverflow(number, &overflow);
    if (overflow < 0 || (overflow == 0 && value < 0))
        return -1;
    return overflow > 0 || value > MAX_ID ? MAX_ID + 1 : (int)value;
}

static Py_ssize_t number_length(PyObject *number)
{
    PyObject *length = PyObject_CallMethod(number, "bit_length", NULL);
    Py_ssize_t value = length == NULL ? -1 : PyLong_AsSsize_t(length);
    Py_XDECREF(length);
    return value;
}

/* Decimal while it is short: int itself refuses to print more than 4,300 digits. */
PyObject *show_number(PyObject *number)
{
    Py_ssize_t length = number_length(number);
    if (length < 0)
        return NULL;
    if (length <= SHOWN_BITS)
        return PyObject_Str(number);
    const char *sign = clamp_number(number) < 0 ? "-" : "";
    return PyUnicode_FromFormat("about %s2**%zd", sign, length - 1);
}

static void raise_id(PyObject *number)
{
    PyObject *shown = show_number(number);
    if (shown == NULL)
        return;
    const char *why = clamp_number(number) < 0 ? "is negative" : TOO_LARGE;
    PyErr_Format(PyExc_ValueError, "id %U %s", shown, why);
    Py_DECREF(shown);
}

/* The id, or -1 with an exception set. */
static int id_from_object(PyObject *object)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    int id = clamp_number(number);
    if (id < 0 || id > MAX_ID) {
        raise_id(number);
        id = -1;
    }
    Py_DECREF(number);
    return id;
}

static int bits_from_iterable(Bits *bits, PyObject *iterable)
{
    PyObject *iterator = PyObject_GetIter(iterable);
    if (iterator == NULL)
        return -1;
    PyObject *item;
    while ((item = PyIter_Next(iterator)) != NULL) {
        int id = id_from_object(item);
        Py_DECREF(item);
        if (id < 0)
            break;
        bits_add(bits, id);
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

static void bits_from_bytes(Bits *bits, const char *bytes)
{
    for (int i = 0; i < BYTES; i++)
        bits->word[i / 8] |= (uint64_t)(unsigned char)bytes[i] << (i % 8 * 8);
}

static void bits_to_bytes(const Bits *bits, char *bytes)
{
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (char)(unsigned char)(bits->word[i / 8] >> (i % 8 * 8));
}

static int check_number(PyObject *number)
{
    Py_ssize_t length = number_length(number);
    if (length < 0)
        return -1;
    if (clamp_number(number) < 0)
        PyErr_SetString(PyExc_ValueError, "a negative int is no set of ids");
    else if (length > MAX_ID + 1)
        PyErr_Format(PyExc_ValueError, "id %zd " TOO_LARGE, length - 1);
    else
        return 0;
    return -1;
}

static int bits_from_number(Bits *bits, PyObject *number)
{
    if (check_number(number) < 0)
        return -1;
    PyObject *bytes = PyObject_CallMethod(number, "to_bytes", "is", BYTES, "little");
    if (bytes == NULL)
        return -1;
    bits_from_bytes(bits, PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return 0;
}

static PyObject *bits_to_number(const Bits *bits)
{
    char bytes[BYTES];
    bits_to_bytes(bits, bytes);
    return PyObject_CallMethod((PyObject *)&PyLong_Type, "from_bytes", "y#s", bytes,
                               (Py_ssize_t)BYTES, "little");
}

/* ---- texts ----------------------------------------------------------------------------------- */

#define QUOTED_LENGTH 40

typedef struct {
    const char *start, *end;
} Span;

/* A text under the scanner. Its copy has "?", which no syntax knows, for every character beyond
   ASCII; so an offset in one is an offset in the other. */
typedef struct {
    PyObject *original;
    PyObject *copy;
    const char *chars;
    Span body; /* without the white space around it */
} Text;

static int is_white(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static Span strip(Span span)
{
    while (span.start < span.end && is_white(span.end[-1]))
        span.end--;
    while (span.start < span.end && is_white(*span.start))
        span.start++;
    return span;
}

static Span strip_with_nuls(Span span)
{
    while (span.start < span.end && (span.end[-1] == '\0' || is_white(span.end[-1])))
        span.end--;
    return strip(span);
}

static int open_text(Text *text, PyObject *object)
{
    if (!PyUnicode_Check(object)) {
        raise_type("text must be str, not %U", object);
        return -1;
    }
    text->original = object;
    text->copy = PyUnicode_AsEncodedString(object, "ascii", "replace");
    if (text->copy == NULL)
        return -1;
    text->chars = PyBytes_AsString(text->copy);
    text->body = strip_with_nuls((Span){text->chars, text->chars + PyBytes_Size(text->copy)});
    return 0;
}

static void close_text(Text *text)
{
    Py_DECREF(text->copy);
}

/* Cuts the next field off `rest`; 0 when none is left. */
static int next_field(Span *rest, Span *field)
{
    if (rest->start == NULL)
        return 0;
    const char *comma = memchr(rest->start, ',', (size_t)(rest->end - rest->start));
    *field = (Span){rest->start, comma == NULL ? rest->end : comma};
    rest->start = comma == NULL ? NULL : comma + 1;
    return 1;
}

/* At most 40 characters of the original, in printable ASCII, between `mark`s. */
static PyObject *show_span(const Text *text, Span span, const char *mark)
{
    int cut = span.end - span.start > QUOTED_LENGTH;
    Py_ssize_t start = span.start - text->chars;
    Py_ssize_t end = cut ? start + QUOTED_LENGTH : span.end - text->chars;
    PyObject *part = PyUnicode_Substring(text->original, start, end);
    PyObject *escaped = part == NULL ? NULL : PyUnicode_AsUnicodeEscapeString(part);
    Py_XDECREF(part);
    if (escaped == NULL)
        return NULL;
    PyObject *shown = PyUnicode_FromFormat("%s%s%s%s", mark, PyBytes_AsString(escaped),
                                           cut ? "\xe2\x80\xa6" : "", mark);
    Py_DECREF(escaped);
    return shown;
}

/* Raises ValueError '"text" is no <kind>: <reason>'. Takes the reason over; it is NULL where making
   it failed. */
static void refuse(const Text *text, const char *kind, PyObject *reason)
{
    PyObject *quoted = reason == NULL ? NULL : show_span(text, text->body, "\"");
    if (quoted != NULL)
        PyErr_Format(PyExc_ValueError, "%U is no %s: %U", quoted, kind, reason);
    Py_XDECREF(quoted);
    Py_XDECREF(reason);
}

/* As `refuse`; `format` takes the span, shown between `mark`s. */
static void refuse_span(const Text *text, const char *kind, const char *format, Span span,
                        const char *mark)
{
    PyObject *shown = show_span(text, span, mark);
    refuse(text, kind, shown == NULL ? NULL : PyUnicode_FromFormat(format, shown));
    Py_XDECREF(shown);
}

static void refuse_item(const Text *text, Span item, const char *format)
{
    refuse_span(text, "list of ids", format, item, "\"");
}

static void refuse_id(const Text *text, Span digits)
{
    while (digits.start + 1 < digits.end && *digits.start == '0')
        digits.start++;
    refuse_span(text, "list of ids", "id %U " TOO_LARGE, digits, "");
}

static Span take_digits(const char *start, const char *end)
{
    Span digits = {start, start};
    while (digits.end < end && is_digit(*digits.end))
        digits.end++;
    return digits;
}

/* The id, or -1 with an exception set. */
static int read_id(const Text *text, Span digits)
{
    int id = 0;
    for (const char *p = digits.start; p < digits.end && id <= MAX_ID; p++)
        id = id * 10 + (*p - '0');
    if (id <= MAX_ID)
        return id;
    refuse_id(text, digits);
    return -1;
}

/* Finds the digits of "5" or "5-7": whether the item has that form. */
static int split_item(Span item, Span *first, Span *last)
{
    *first = *last = take_digits(item.start, item.end);
    if (first->end < item.end && *first->end == '-')
        *last = take_digits(first->end + 1, item.end);
    return first->start < first->end && last->start < last->end && last->end == item.end;
}

static int read_item(Bits *bits, const Text *text, Span item)
{
    Span first_digits, last_digits;
    if (!split_item(item, &first_digits, &last_digits)) {
        int stride = memchr(item.start, ':', (size_t)(item.end - item.start)) != NULL;
        refuse_item(text, item, stride ? "%U has a stride, which numalet does not handle"
                                       : "%U is neither a number nor a range");
        return -1;
    }
    int first = read_id(text, first_digits);
    int last = first < 0 ? -1 : read_id(text, last_digits);
    if (last < 0)
        return -1;
    if (first > last) {
        refuse_item(text, item, "the range %U runs backwards");
        return -1;
    }
    bits_add_range(bits, first, last);
    return 0;
}

static int read_list(Bits *bits, const Text *text)
{
    Span rest = text->body, item;
    if (rest.start == rest.end)
        return 0;
    while (next_field(&rest, &item))
        if (read_item(bits, text, strip(item)) < 0)
            return -1;
    return 0;
}

/* The value of a hex digit, or -1. */
static int hex_digit(char c)
{
    if (is_digit(c))
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int read_word(uint32_t *word, const Text *text, Span digits)
{
    int good = digits.start < digits.end && digits.end - digits.start <= 8;
    *word = 0;
    for (const char *p = digits.start; good && p < digits.end; p++) {
        int digit = hex_digit(*p);
        good = digit >= 0;
        *word = *word << 4 | ((uint32_t)digit & 0xf);
    }
    if (good)
        return 0;
    refuse_span(text, "mask", "%U is not a word of 1 to 8 hex digits", digits, "\"");
    return -1;
}

static Py_ssize_t count_fields(Span rest)
{
    Py_ssize_t count = 0;
    Span field;
    while (next_field(&rest, &field))
        count++;
    return count;
}

static int read_mask(Bits *bits, const Text *text)
{
    Span rest = text->body, digits;
    Py_ssize_t highest = 0; /* member */
    uint32_t word;
    for (Py_ssize_t at = count_fields(rest) - 1; next_field(&rest, &digits); at--) {
        if (read_word(&word, text, digits) < 0)
            return -1;
        if (word != 0 && highest == 0)
            highest = at * 32 + 31 - __builtin_clz(word);
        if (at < WORDS * 2)
            bits->word[at / 2] |= (uint64_t)word << (at % 2 * 32);
    }
    if (highest <= MAX_ID)
        return 0;
    refuse(text, "mask", PyUnicode_FromFormat("id %zd " TOO_LARGE, highest));
    return -1;
}

static char *put_number(char *out, int number)
{
    if (number >= 10)
        out = put_number(out, number / 10);
    *out++ = (char)('0' + number % 10);
    return out;
}

/* Longest when pairs stand next to single gaps: 342 times "1000-1001,". */
static PyObject *format_list(const Bits *bits)
{
    char text[342 * 10], *out = text;
    int beyond;
    for (int id = bits_next(bits, 0); id <= MAX_ID; id = bits_next(bits, beyond)) {
        beyond = bits_next_gap(bits, id);
        if (out > text)
            *out++ = ',';
        out = put_number(out, id);
        if (beyond > id + 1) {
            *out++ = '-';
            out = put_number(out, beyond - 1);
        }
    }
    return PyUnicode_FromStringAndSize(text, out - text);
}

static uint32_t half_word(const Bits *bits, int at)
{
    return (uint32_t)(bits->word[at / 2] >> (at % 2 * 32));
}

static PyObject *format_mask(const Bits *bits)
{
    char text[WORDS * 2 * 9], *out = text;
    int at = WORDS * 2 - 1;
    while (at > 0 && half_word(bits, at) == 0)
        at--;
    for (; at >= 0; at--) {
        for (int shift = 28; shift >= 0; shift -= 4)
            *out++ = "0123456789abcdef"[half_word(bits, at) >> shift & 0xf];
        *out++ = ',';
    }
    return PyUnicode_FromStringAndSize(text, out - text - 1);
}

/* ---- Bitmap ---------------------------------------------------------------------------------- */

_Static_assert(sizeof(Py_hash_t) == 8, "hash(int) is defined otherwise where words have 32 bits");

PyObject *bitmap_make(PyTypeObject *type, const Bits *bits)
{
    Bitmap *made = PyObject_New(Bitmap, type);
    if (made != NULL)
        made->bits = *bits;
    return (PyObject *)made;
}

static PyObject *bitmap_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    char *names[] = {"", NULL};
    PyObject *ids = NULL;
    Bits bits = no_bits;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:Bitmap", names, &ids))
        return NULL;
    if (ids != NULL && bits_from_iterable(&bits, ids) < 0)
        return NULL;
    return bitmap_make(type, &bits);
}

static void bitmap_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *bitmap_from_int(PyObject *type, PyObject *object)
{
    Bits bits = no_bits;
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return NULL;
    int failed = bits_from_number(&bits, number);
    Py_DECREF(number);
    return failed ? NULL : bitmap_make((PyTypeObject *)type, &bits);
}

static PyObject *parse(PyObject *type, PyObject *object, int (*read)(Bits *, const Text *))
{
    Bits bits = no_bits;
    Text text;
    if (open_text(&text, object) < 0)
        return NULL;
    int failed = read(&bits, &text);
    close_text(&text);
    return failed ? NULL : bitmap_make((PyTypeObject *)type, &bits);
}

static PyObject *bitmap_parse_list(PyObject *type, PyObject *text)
{
    return parse(type, text, read_list);
}

static PyObject *bitmap_parse_mask(PyObject *type, PyObject *text)
{
    return parse(type, text, read_mask);
}

static PyObject *bitmap_to_int(PyObject *self, PyObject *Py_UNUSED(none))
{
    return bits_to_number(bits_of(self));
}

static PyObject *bitmap_format_mask(PyObject *self, PyObject *Py_UNUSED(none))
{
    return format_mask(bits_of(self));
}

static PyObject *bitmap_str(PyObject *self)
{
    return format_list(bits_of(self));
}

static PyObject *bitmap_repr(PyObject *self)
{
    PyObject *list = format_list(bits_of(self));
    PyObject *repr = list == NULL ? NULL : PyUnicode_FromFormat("Bitmap.parse_list('%U')", list);
    Py_XDECREF(list);
    return repr;
}

static PyObject *bitmap_first(PyObject *self, PyObject *Py_UNUSED(none))
{
    int id = bits_next(bits_of(self), 0);
    if (id <= MAX_ID)
        return PyLong_FromLong(id);
    PyErr_SetString(PyExc_ValueError, "an empty set has no first id");
    return NULL;
}

int read_count(PyObject *number, int length)
{
    long count = PyLong_AsLongAndOverflow(number, &(int){0}); /* -1 if too large */
    if (count >= 0 && count <= length)
        return (int)count;
    PyObject *shown = show_number(number);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError, "%U ids cannot be taken from a set of %d", shown, length);
    Py_XDECREF(shown);
    return -1;
}

static PyObject *bitmap_lowest(PyObject *self, PyObject *object)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return NULL;
    int count = read_count(number, bits_count(bits_of(self)));
    Py_DECREF(number);
    if (count < 0)
        return NULL;
    Bits lowest = bits_lowest(bits_of(self), count);
    return bitmap_make(Py_TYPE(self), &lowest);
}

static PyObject *bitmap_isdisjoint(PyObject *self, PyObject *other)
{
    if (Py_TYPE(self) == Py_TYPE(other))
        return PyBool_FromLong(bits_disjoint(bits_of(self), bits_of(other)));
    raise_type("isdisjoint takes a Bitmap, not %U", other);
    return NULL;
}

static PyObject *bitmap_reduce(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *maker = PyObject_GetAttrString((PyObject *)Py_TYPE(self), "from_int");
    PyObject *number = maker == NULL ? NULL : bits_to_number(bits_of(self));
    PyObject *reduced = number == NULL ? NULL : Py_BuildValue("O(O)", maker, number);
    Py_XDECREF(number);
    Py_XDECREF(maker);
    return reduced;
}

#define OPERATOR(name, expression)                                                                 \
    static PyObject *name(PyObject *left, PyObject *right)                                         \
    {                                                                                              \
        if (Py_TYPE(left) != Py_TYPE(right))                                                       \
            Py_RETURN_NOTIMPLEMENTED;                                                              \
        Bitmap *made = PyObject_New(Bitmap, Py_TYPE(left));                                        \
        for (int i = 0; made != NULL && i < WORDS; i++) {                                          \
            uint64_t a = bits_of(left)->word[i], b = bits_of(right)->word[i];                      \
            made->bits.word[i] = expression;                                                       \
        }                                                                                          \
        return (PyObject *)made;                                                                   \
    }

OPERATOR(bitmap_and, a & b)
OPERATOR(bitmap_or, a | b)
OPERATOR(bitmap_xor, a ^ b)
OPERATOR(bitmap_subtract, a & ~b)

static int relate(const Bits *a, const Bits *b, int relation)
{
    switch (relation) {
    case Py_EQ:
        return bits_equal(a, b);
    case Py_NE:
        return !bits_equal(a, b);
    case Py_LE:
        return bits_within(a, b);
    case Py_LT:
        return bits_within(a, b) && !bits_equal(a, b);
    case Py_GE:
        return bits_within(b, a);
    default:
        return bits_within(b, a) && !bits_equal(a, b);
    }
}

static PyObject *bitmap_richcompare(PyObject *self, PyObject *other, int relation)
{
    if (Py_TYPE(self) != Py_TYPE(other))
        Py_RETURN_NOTIMPLEMENTED;
    return PyBool_FromLong(relate(bits_of(self), bits_of(other), relation));
}

static Py_hash_t bitmap_hash(PyObject *self)
{
    return (Py_hash_t)bits_hash(bits_of(self));
}

static int bitmap_contains(PyObject *self, PyObject *object)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    int id = clamp_number(number);
    Py_DECREF(number);
    return id >= 0 && id <= MAX_ID && bits_have(bits_of(self), id);
}

static Py_ssize_t bitmap_length(PyObject *self)
{
    return bits_count(bits_of(self));
}

static int bitmap_bool(PyObject *self)
{
    return !bits_equal(bits_of(self), &no_bits);
}

static PyObject *bits_to_tuple(const Bits *bits)
{
    Py_ssize_t length = bits_count(bits);
    PyObject *tuple = PyTuple_New(length);
    int id = -1;
    for (Py_ssize_t i = 0; tuple != NULL && i < length; i++) {
        id = bits_next(bits, id + 1);
        PyObject *item = PyLong_FromLong(id);
        if (item == NULL || PyTuple_SetItem(tuple, i, item) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *bitmap_iter(PyObject *self)
{
    PyObject *tuple = bits_to_tuple(bits_of(self));
    PyObject *iterator = tuple == NULL ? NULL : PyObject_GetIter(tuple);
    Py_XDECREF(tuple);
    return iterator;
}

static PyMethodDef bitmap_methods[] = {
    {"from_int", bitmap_from_int, METH_O | METH_CLASS,
     "from_int($type, bits, /)\n--\n\nThe set that has i as a member where bit i is set."},
    {"parse_list", bitmap_parse_list, METH_O | METH_CLASS,
     "parse_list($type, text, /)\n--\n\nReads \"0-3,64-67\". Empty text is the empty set."},
    {"parse_mask", bitmap_parse_mask, METH_O | METH_CLASS,
     "parse_mask($type, text, /)\n--\n\nReads \"00000000,00ffffff\": words of 32 bits."},
    {"to_int", bitmap_to_int, METH_NOARGS,
     "to_int($self, /)\n--\n\nThe int whose bit i is set where i is a member."},
    {"format_mask", bitmap_format_mask, METH_NOARGS,
     "format_mask($self, /)\n--\n\nThe text that parse_mask reads, in as few words as hold it."},
    {"first", bitmap_first, METH_NOARGS, "first($self, /)\n--\n\nThe lowest member."},
    {"lowest", bitmap_lowest, METH_O,
     "lowest($self, count, /)\n--\n\nThe set of the lowest members."},
    {"isdisjoint", bitmap_isdisjoint, METH_O,
     "isdisjoint($self, other, /)\n--\n\nWhether the two sets have no member in common."},
    {"__reduce__", bitmap_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bitmap_slots[] = {
    {Py_tp_doc, "Bitmap(ids=(), /)\n--\n\nAn immutable set of the ids 0..1023."},
    {Py_tp_new, bitmap_new},
    {Py_tp_dealloc, bitmap_dealloc},
    {Py_tp_methods, bitmap_methods},
    {Py_tp_richcompare, bitmap_richcompare},
    {Py_tp_hash, bitmap_hash},
    {Py_tp_iter, bitmap_iter},
    {Py_tp_str, bitmap_str},
    {Py_tp_repr, bitmap_repr},
    {Py_nb_and, bitmap_and},
    {Py_nb_or, bitmap_or},
    {Py_nb_xor, bitmap_xor},
    {Py_nb_subtract, bitmap_subtract},
    {Py_nb_bool, bitmap_bool},
    {Py_sq_length, bitmap_length},
    {Py_sq_contains, bitmap_contains},
    {0, NULL},
};

static PyType_Spec bitmap_spec = {
    .name = "agent.core.bitmap.Bitmap",
    .basicsize = sizeof(Bitmap),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bitmap_slots,
};

typedef struct {
    PyTypeObject *bitmap;
} State;

static State *state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

PyTypeObject *bitmap_type(PyObject *module)
{
    return state_of(module)->bitmap;
}

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &bitmap_spec, NULL);
    state_of(module)->bitmap = (PyTypeObject *)type;
    if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "MAX_ID", MAX_ID) < 0)
        return -1;
    return search_add_constants(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(state_of(module)->bitmap);
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(state_of(module)->bitmap);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "agent.core._bitmap",
    .m_doc = "Bitmap and searches in C; the Python twins _bitmap_py and _search_py define them.",
    .m_size = sizeof(State),
    .m_methods = search_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__bitmap(void)
{
    return PyModuleDef_Init(&module_definition);
}
