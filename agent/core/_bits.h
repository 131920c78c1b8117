/* Shared by the C files of the module _bitmap: the layer Bits, whose functions know no Python and
   cannot fail, and what _search.c needs of _bitmap.c. */

#ifndef NUMALET_BITS_H
#define NUMALET_BITS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_ID 1023
#define WORDS 16

/* ---- Bits ------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t word[WORDS];
} Bits;

static const Bits no_bits = {{0}};

static inline void bits_add(Bits *bits, int id)
{
    bits->word[id / 64] |= UINT64_C(1) << (id % 64);
}

static inline void bits_add_range(Bits *bits, int first, int last)
{
    for (int i = first / 64; i <= last / 64; i++) {
        int low = i == first / 64 ? first % 64 : 0;
        int high = i == last / 64 ? last % 64 : 63;
        bits->word[i] |= (UINT64_MAX >> (63 - (high - low))) << low;
    }
}

static inline int bits_have(const Bits *bits, int id)
{
    return (int)(bits->word[id / 64] >> (id % 64) & 1);
}

static inline int bits_count(const Bits *bits)
{
    int count = 0;
    for (int i = 0; i < WORDS; i++)
        count += __builtin_popcountll(bits->word[i]);
    return count;
}

static inline int bits_equal(const Bits *a, const Bits *b)
{
    return memcmp(a, b, sizeof(Bits)) == 0;
}

static inline int bits_within(const Bits *a, const Bits *b)
{
    uint64_t outside = 0;
    for (int i = 0; i < WORDS; i++)
        outside |= a->word[i] & ~b->word[i];
    return outside == 0;
}

static inline int bits_disjoint(const Bits *a, const Bits *b)
{
    uint64_t common = 0;
    for (int i = 0; i < WORDS; i++)
        common |= a->word[i] & b->word[i];
    return common == 0;
}

static inline void bits_add_all(Bits *bits, const Bits *others)
{
    for (int i = 0; i < WORDS; i++)
        bits->word[i] |= others->word[i];
}

static inline Bits bits_and(const Bits *a, const Bits *b)
{
    Bits both;
    for (int i = 0; i < WORDS; i++)
        both.word[i] = a->word[i] & b->word[i];
    return both;
}

static inline Bits bits_minus(const Bits *a, const Bits *b)
{
    Bits rest;
    for (int i = 0; i < WORDS; i++)
        rest.word[i] = a->word[i] & ~b->word[i];
    return rest;
}

/* The next id from `from` on whose bit is not as in `flip`; MAX_ID + 1 if there is none. */
static inline int bits_find(const Bits *bits, int from, uint64_t flip)
{
    for (int i = from / 64; i < WORDS; i++) {
        uint64_t word = bits->word[i] ^ flip;
        if (i == from / 64)
            word &= UINT64_MAX << (from % 64);
        if (word != 0)
            return i * 64 + __builtin_ctzll(word);
    }
    return MAX_ID + 1;
}

static inline int bits_next(const Bits *bits, int from)
{
    return bits_find(bits, from, 0);
}

static inline int bits_next_gap(const Bits *bits, int from)
{
    return bits_find(bits, from, UINT64_MAX);
}

static inline uint64_t word_lowest(uint64_t word, int count)
{
    uint64_t rest = word;
    while (count-- > 0)
        rest &= rest - 1;
    return word ^ rest;
}

static inline Bits bits_lowest(const Bits *bits, int count)
{
    Bits lowest = no_bits;
    for (int i = 0; i < WORDS && count > 0; i++) {
        int here = __builtin_popcountll(bits->word[i]);
        lowest.word[i] = here <= count ? bits->word[i] : word_lowest(bits->word[i], count);
        count -= here;
    }
    return lowest;
}

/* What hash() says of the same bits as an int: the int modulo 2**61 - 1. In it 2**64 is 8, and
   eight times a number is the number rotated by three of 61 bits. */
static inline uint64_t bits_hash(const Bits *bits)
{
    const uint64_t prime = (UINT64_C(1) << 61) - 1;
    uint64_t hash = 0;
    for (int i = WORDS - 1; i >= 0; i--) {
        hash = (hash << 3 & prime) | hash >> 58;
        hash += (bits->word[i] & prime) + (bits->word[i] >> 61);
        while (hash >= prime)
            hash -= prime;
    }
    return hash;
}

/* ---- what _bitmap.c and _search.c need of each other ----------------------------------------- */

typedef struct {
    PyObject_HEAD
    Bits bits;
} Bitmap;

static inline const Bits *bits_of(PyObject *bitmap)
{
    return &((Bitmap *)bitmap)->bits;
}

#pragma GCC visibility push(hidden)

/* Raises TypeError: `format` takes the name of the object's type. */
void raise_type(const char *format, PyObject *object);
PyObject *show_number(PyObject *number);
/* The count, or -1 with an exception set where it is not 0..length. */
int read_count(PyObject *number, int length);
PyObject *bitmap_make(PyTypeObject *type, const Bits *bits);
/* The type Bitmap of this module object. */
PyTypeObject *bitmap_type(PyObject *module);

extern PyMethodDef search_methods[];
int search_add_constants(PyObject *module);

#pragma GCC visibility pop

#endif
