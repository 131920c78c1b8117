/* The searches choose_subset (GPUs) and choose_cpus.

   Mirrors _search_py.py, which is the definition: results and error texts are the same, and one
   test suite runs on both. What a search prefers, and why it is right, is written there.

   The searches themselves are plain C on plain values; the last part reads their arguments. They
   hold the GIL: they run for microseconds, and choose_subset for milliseconds at its worst. */

#include "_bits.h"
#include <limits.h>

/* ---- choose_subset --------------------------------------------------------------------------- */

#define MAX_ROWS 64
#define MAX_SCORE 1000000
#define MAX_SUBSETS 200000

typedef struct {
    int rows;
    int32_t score[MAX_ROWS][MAX_ROWS];
} Scores;

/* A choice that grows or changes. Candidate c is bit 63 - c of the set, so of two choices of the
   same size the one with lower ids is the greater number.

   The worth is inner * 2**32 - links, where `links` adds up the scores of each member to all of
   `among`: twice the inner ones, and the cut ones. So more worth is more inside, then less cut. */
typedef struct {
    int64_t worth;
    uint64_t set;
} Choice;

#define ONE_INNER (INT64_C(1) << 32)

/* 64 members have less than 2**31 inside and less than 2**32 of links. */
_Static_assert(INT64_C(64) * 63 * MAX_SCORE < ONE_INNER, "a worth does not fit into 64 bits");

/* Those of `among` that are not included, in ascending order of ids. */
typedef struct {
    int count;
    int id[MAX_ROWS];
    int64_t gain[MAX_ROWS];           /* the worth that each adds to the included ones */
    int64_t link[MAX_ROWS][MAX_ROWS]; /* the worth that two add by being chosen together */
} Candidates;

static uint64_t choice_bit(int candidate)
{
    return UINT64_C(1) << (63 - candidate);
}

static int is_better(Choice a, Choice b)
{
    return a.worth > b.worth || (a.worth == b.worth && a.set > b.set);
}

static void keep_better(Choice *best, Choice choice)
{
    if (is_better(choice, *best))
        *best = choice;
}

static int64_t sum_scores(const int32_t *row, uint64_t ids)
{
    int64_t sum = 0;
    for (; ids != 0; ids &= ids - 1)
        sum += row[__builtin_ctzll(ids)];
    return sum;
}

static int64_t gain_of(const int32_t *row, uint64_t among, uint64_t chosen)
{
    return sum_scores(row, chosen) * ONE_INNER - sum_scores(row, among);
}

static Choice included(const Scores *scores, uint64_t among, uint64_t include)
{
    Choice choice = {0, 0};
    uint64_t earlier = 0;
    for (uint64_t rest = include; rest != 0; rest &= rest - 1) {
        choice.worth += gain_of(scores->score[__builtin_ctzll(rest)], among, earlier);
        earlier |= rest & -rest;
    }
    return choice;
}

static void list_candidates(Candidates *all, const Scores *scores, uint64_t among, uint64_t include)
{
    all->count = 0;
    for (uint64_t rest = among & ~include; rest != 0; rest &= rest - 1)
        all->id[all->count++] = __builtin_ctzll(rest);
    for (int c = 0; c < all->count; c++) {
        const int32_t *row = scores->score[all->id[c]];
        all->gain[c] = gain_of(row, among, include);
        for (int d = 0; d < all->count; d++)
            all->link[c][d] = row[all->id[d]] * ONE_INNER;
    }
}

/* Tries all ways to add `missing` candidates, at least one, from number `from` on. */
static void try_all(const Candidates *all, Choice choice, const int64_t *gain, int from,
                    int missing, Choice *best)
{
    int64_t gain_then[MAX_ROWS];
    for (int c = from; c <= all->count - missing; c++) {
        Choice then = {choice.worth + gain[c], choice.set | choice_bit(c)};
        if (missing == 1) {
            keep_better(best, then);
            continue;
        }
        for (int d = c + 1; d < all->count; d++)
            gain_then[d] = gain[d] + all->link[c][d];
        try_all(all, then, gain_then, c + 1, missing - 1, best);
    }
}

typedef struct {
    Choice choice;
    int64_t gain[MAX_ROWS]; /* the worth that each candidate adds, or has added */
} Climb;

static int is_chosen(const Climb *climb, int candidate)
{
    return (climb->choice.set & choice_bit(candidate)) != 0;
}

static void choose(const Candidates *all, Climb *climb, int candidate)
{
    climb->choice.worth += climb->gain[candidate];
    climb->choice.set |= choice_bit(candidate);
    for (int d = 0; d < all->count; d++)
        climb->gain[d] += all->link[candidate][d];
}

static void leave(const Candidates *all, Climb *climb, int candidate)
{
    climb->choice.worth -= climb->gain[candidate];
    climb->choice.set &= ~choice_bit(candidate);
    for (int d = 0; d < all->count; d++)
        climb->gain[d] -= all->link[candidate][d];
}

static int find_greatest_gain(const Candidates *all, const Climb *climb)
{
    int greatest = -1;
    for (int c = 0; c < all->count; c++)
        if (!is_chosen(climb, c) && (greatest < 0 || climb->gain[c] > climb->gain[greatest]))
            greatest = c;
    return greatest;
}

static Choice exchanged(const Candidates *all, const Climb *climb, int leaver, int comer)
{
    int64_t gain = climb->gain[comer] - all->link[leaver][comer] - climb->gain[leaver];
    uint64_t set = climb->choice.set ^ choice_bit(leaver) ^ choice_bit(comer);
    return (Choice){climb->choice.worth + gain, set};
}

/* Makes the best exchange of one member for another; 0 where none is better. */
static int exchange(const Candidates *all, Climb *climb)
{
    Choice best = climb->choice;
    int best_leaver = -1, best_comer = -1;
    for (int leaver = 0; leaver < all->count; leaver++)
        for (int comer = 0; is_chosen(climb, leaver) && comer < all->count; comer++) {
            if (is_chosen(climb, comer) || !is_better(exchanged(all, climb, leaver, comer), best))
                continue;
            best = exchanged(all, climb, leaver, comer);
            best_leaver = leaver;
            best_comer = comer;
        }
    if (best_leaver < 0)
        return 0;
    leave(all, climb, best_leaver);
    choose(all, climb, best_comer);
    return 1;
}

static void climb_from_each(const Candidates *all, Choice start, int missing, Choice *best)
{
    for (int first = 0; first < all->count; first++) {
        Climb climb = {.choice = start};
        memcpy(climb.gain, all->gain, sizeof climb.gain);
        choose(all, &climb, first);
        for (int more = 1; more < missing; more++)
            choose(all, &climb, find_greatest_gain(all, &climb));
        while (exchange(all, &climb))
            ;
        keep_better(best, climb.choice);
    }
}

/* Whether `count` of `total` can be chosen in at most MAX_SUBSETS ways. */
static int are_few(int total, int count)
{
    int64_t ways = 1;
    if (count > total - count)
        count = total - count;
    for (int i = 0; i < count && ways <= MAX_SUBSETS; i++)
        ways = ways * (total - i) / (i + 1);
    return ways <= MAX_SUBSETS;
}

static uint64_t choose_subset(const Scores *scores, uint64_t among, uint64_t include, int count,
                              int64_t *inner)
{
    Candidates all;
    int missing = count - __builtin_popcountll(include);
    Choice start = included(scores, among, include), best = {INT64_MIN, 0};
    list_candidates(&all, scores, among, include);
    if (missing == 0)
        best = start;
    else if (are_few(all.count, missing))
        try_all(&all, start, all.gain, 0, missing, &best);
    else
        climb_from_each(&all, start, missing, &best);
    *inner = (best.worth + ONE_INNER - 1) >> 32;
    uint64_t chosen = include;
    for (int c = 0; c < all.count; c++)
        if (best.set & choice_bit(c))
            chosen |= UINT64_C(1) << all.id[c];
    return chosen;
}

/* ---- choose_cpus ----------------------------------------------------------------------------- */

/* Disjoint sets that are not empty, so there are at most as many as ids. */
typedef struct {
    int count;
    const Bits *set[MAX_ID + 1];
    Bits all;
} Sets;

typedef struct {
    const Bits *cpus;
    int size;
    int group;
    int whole; /* all its CPUs are free */
} Core;

/* The cores of one cache; the last group has those of none. */
typedef struct {
    int whole;  /* CPUs of its whole cores */
    int broken; /* free CPUs of its broken cores */
    Bits sums;  /* how many CPUs some of its whole cores can have together */
} Group;

/* How many CPUs to take from whole cores, how many from broken ones, and whether one whole core is
   taken in part. */
typedef struct {
    int whole, broken;
    int splits;
} Plan;

/* The best way to get some number of CPUs. Each group touched costs TOUCH and its free CPUs; TOUCH
   is more than all CPUs together, so fewer groups come first. */
typedef struct {
    int cost;
    Bits groups;
} Way;

#define TOUCH (2 * (MAX_ID + 1))
#define NO_WAY INT_MAX

typedef struct {
    const Bits *free;
    const Sets *caches;
    int group_of[MAX_ID + 1]; /* each CPU's */
    Bits lowest;              /* the lowest CPU of each core */
    Core core[MAX_ID + 1];    /* each at its lowest CPU, so in ascending order */
    Group *groups;
    Group total;
} Cpus;

/* From now on the sums may have `size` more; those beyond MAX_ID are dropped. */
static void add_to_sums(Bits *sums, int size)
{
    int words = size / 64, shift = size % 64;
    for (int i = WORDS - 1; i >= words; i--) {
        uint64_t moved = sums->word[i - words] << shift;
        if (shift > 0 && i > words)
            moved |= sums->word[i - words - 1] >> (64 - shift);
        sums->word[i] |= moved;
    }
}

static void open_group(Group *group)
{
    *group = (Group){0, 0, no_bits};
    bits_add(&group->sums, 0);
}

static void open_cpus(Cpus *cpus, const Bits *free, const Sets *caches, Group *groups)
{
    cpus->free = free;
    cpus->caches = caches;
    cpus->groups = groups;
    cpus->lowest = no_bits;
    open_group(&cpus->total);
    for (int i = 0; i <= caches->count; i++)
        open_group(&groups[i]);
    for (int cpu = 0; cpu <= MAX_ID; cpu++)
        cpus->group_of[cpu] = caches->count;
    for (int i = 0; i < caches->count; i++)
        for (int cpu = bits_next(caches->set[i], 0); cpu <= MAX_ID;
             cpu = bits_next(caches->set[i], cpu + 1))
            cpus->group_of[cpu] = i;
}

/* The core's group, or -1 where it is not in one cache. */
static int find_group(const Cpus *cpus, const Bits *core)
{
    const Sets *caches = cpus->caches;
    int group = cpus->group_of[bits_next(core, 0)];
    int fits = group == caches->count ? bits_disjoint(core, &caches->all)
                                      : bits_within(core, caches->set[group]);
    return fits ? group : -1;
}

static void count_core(Group *group, int whole, int free)
{
    if (whole) {
        group->whole += free;
        add_to_sums(&group->sums, free);
    } else {
        group->broken += free;
    }
}

static void add_core(Cpus *cpus, const Bits *core_cpus, int group)
{
    int lowest = bits_next(core_cpus, 0), size = bits_count(core_cpus);
    int whole = bits_within(core_cpus, cpus->free);
    Bits free = bits_and(core_cpus, cpus->free);
    int free_count = whole ? size : bits_count(&free);
    bits_add(&cpus->lowest, lowest);
    cpus->core[lowest] = (Core){core_cpus, size, group, whole};
    count_core(&cpus->groups[group], whole, free_count);
    count_core(&cpus->total, whole, free_count);
}

static Plan make_plan(const Group *total, int count)
{
    int whole = count;
    while (!bits_have(&total->sums, whole))
        whole--;
    if (count - whole <= total->broken)
        return (Plan){whole, count - whole, 0};
    return (Plan){count, 0, 1};
}

static void touch(Way *way, const Group *group, int place)
{
    way->cost += TOUCH + group->whole + group->broken;
    bits_add(&way->groups, place);
}

/* Where all whole cores are taken, their groups are touched in any case. */
static Way touch_all_whole(const Cpus *cpus, Plan *plan)
{
    Way way = {0, no_bits};
    for (int i = 0; i <= cpus->caches->count; i++) {
        const Group *group = &cpus->groups[i];
        if (group->whole == 0)
            continue;
        touch(&way, group, i);
        plan->whole -= group->whole;
        plan->broken -= group->broken < plan->broken ? group->broken : plan->broken;
    }
    return way;
}

/* Whether a has the lowest of the members that only one of them has. */
static int bits_precede(const Bits *a, const Bits *b)
{
    for (int i = 0; i < WORDS; i++) {
        uint64_t differ = a->word[i] ^ b->word[i];
        if (differ != 0)
            return (a->word[i] & differ & -differ) != 0;
    }
    return 0;
}

static void keep_better_way(Way *best, const Way *way)
{
    if (way->cost < best->cost ||
        (way->cost == best->cost && bits_precede(&way->groups, &best->groups)))
        *best = *way;
}

/* The ways to get 0..whole and 0..broken CPUs are a table, row by row. A group only leads to later
   entries, so going down, each is left behind before one with the same group can reach it. */
static void add_group(Way *ways, const Plan *plan, const Group *group, int place)
{
    int row = plan->broken + 1;
    Bits sums = group->sums;
    if (plan->splits)
        bits_add_range(&sums, 0, group->whole < MAX_ID ? group->whole : MAX_ID);
    for (int at = (plan->whole + 1) * row - 1; at >= 0; at--) {
        if (ways[at].cost == NO_WAY)
            continue;
        Way way = ways[at];
        touch(&way, group, place);
        for (int whole = 0; whole <= plan->whole - at / row; whole = bits_next(&sums, whole + 1))
            for (int broken = 0; broken <= group->broken && broken < row - at % row; broken++)
                keep_better_way(&ways[at + whole * row + broken], &way);
    }
}

/* 0, or -1 where there is no memory. */
static int choose_groups(Bits *chosen, const Cpus *cpus, Plan plan)
{
    Way start = {0, no_bits};
    if (plan.whole == cpus->total.whole)
        start = touch_all_whole(cpus, &plan);
    int count = (plan.whole + 1) * (plan.broken + 1);
    Way *ways = PyMem_Malloc((size_t)count * sizeof(Way));
    if (ways == NULL)
        return -1;
    for (int i = 0; i < count; i++)
        ways[i].cost = NO_WAY;
    ways[0] = start;
    for (int i = 0; i <= cpus->caches->count; i++) {
        const Group *group = &cpus->groups[i];
        if (group->whole + group->broken > 0 && !bits_have(&start.groups, i))
            add_group(ways, &plan, group, i);
    }
    *chosen = ways[count - 1].groups;
    PyMem_Free(ways);
    return 0;
}

/* Lists the whole cores of the groups in ascending order. Their number. */
static int list_whole_cores(const Core **cores, const Cpus *cpus, const Bits *groups)
{
    int count = 0;
    for (int i = bits_next(&cpus->lowest, 0); i <= MAX_ID; i = bits_next(&cpus->lowest, i + 1))
        if (cpus->core[i].whole && bits_have(groups, cpus->core[i].group))
            cores[count++] = &cpus->core[i];
    return count;
}

/* The free CPUs of the broken cores of the groups. */
static Bits find_broken(const Cpus *cpus, const Bits *groups)
{
    Bits broken = no_bits;
    for (int i = bits_next(&cpus->lowest, 0); i <= MAX_ID; i = bits_next(&cpus->lowest, i + 1)) {
        const Core *core = &cpus->core[i];
        if (!core->whole && bits_have(groups, core->group))
            bits_add_all(&broken, core->cpus);
    }
    return bits_and(&broken, cpus->free);
}

/* For 0..count, the last place in the list from where on some cores have that many CPUs together;
   -1 where there is none. */
static void find_last_places(int *places, const Core *const *cores, int core_count, int count)
{
    for (int sum = 1; sum <= count; sum++)
        places[sum] = -1;
    places[0] = core_count;
    for (int i = core_count - 1; i >= 0; i--)
        for (int sum = count; sum >= cores[i]->size; sum--)
            if (places[sum] < 0 && places[sum - cores[i]->size] >= 0)
                places[sum] = i;
}

static void take_whole(Bits *taken, const Core *const *cores, int core_count, int count)
{
    int places[MAX_ID + 1];
    find_last_places(places, cores, core_count, count);
    for (int i = 0; i < core_count; i++)
        if (cores[i]->size <= count && places[count - cores[i]->size] > i) {
            bits_add_all(taken, cores[i]->cpus);
            count -= cores[i]->size;
        }
}

static int can_give(const Core *core, int above, int excess)
{
    if (excess <= 0 || core->size <= excess)
        return excess <= 0;
    Bits passed = no_bits;
    bits_add_range(&passed, 0, above);
    Bits higher = bits_minus(core->cpus, &passed);
    return bits_count(&higher) >= excess;
}

/* Moves the cores to open to the front of the list. Their number; `excess` is what they have too
   much. */
static int open_cores(const Core **cores, int core_count, int count, int *excess)
{
    int opened = 0;
    *excess = -count;
    for (int i = 0; i < core_count; i++) {
        int excess_then = *excess + cores[i]->size, can = 0;
        int lowest = bits_next(cores[i]->cpus, 0);
        cores[opened] = cores[i];
        for (int giver = opened; giver >= 0 && !can; giver--)
            can = can_give(cores[giver], lowest, excess_then);
        if (can) {
            *excess = excess_then;
            opened++;
        }
    }
    return opened;
}

static Bits highest(const Core *core, int count)
{
    Bits kept = bits_lowest(core->cpus, core->size - count);
    return bits_minus(core->cpus, &kept);
}

static void take_split(Bits *taken, const Core **cores, int core_count, int count)
{
    int excess, lowest_given = -1;
    Bits given = no_bits;
    int opened = open_cores(cores, core_count, count, &excess);
    for (int i = 0; i < opened; i++) {
        bits_add_all(taken, cores[i]->cpus);
        if (cores[i]->size <= excess)
            continue;
        Bits high = highest(cores[i], excess);
        if (bits_next(&high, 0) > lowest_given) {
            lowest_given = bits_next(&high, 0);
            given = high;
        }
    }
    *taken = bits_minus(taken, &given);
}

/* 0, or -1 where there is no memory. */
static int choose_cpus(Bits *chosen, const Cpus *cpus, int count)
{
    Bits groups;
    const Core *cores[MAX_ID + 1];
    if (count == bits_count(cpus->free)) { /* so no count below is over MAX_ID */
        *chosen = *cpus->free;
        return 0;
    }
    Plan plan = make_plan(&cpus->total, count);
    if (choose_groups(&groups, cpus, plan) < 0)
        return -1;
    Bits broken = find_broken(cpus, &groups);
    *chosen = bits_lowest(&broken, plan.broken);
    int core_count = list_whole_cores(cores, cpus, &groups);
    if (plan.splits)
        take_split(chosen, cores, core_count, plan.whole);
    else
        take_whole(chosen, cores, core_count, plan.whole);
    return 0;
}

/* ---- arguments and results ------------------------------------------------------------------- */

/* Raises ValueError: `format` takes a set, as %S, and then a number, as %d. */
static void raise_set(PyTypeObject *type, const char *format, const Bits *bits, int number)
{
    PyObject *set = bitmap_make(type, bits);
    if (set != NULL)
        PyErr_Format(PyExc_ValueError, format, set, number);
    Py_XDECREF(set);
}

static int check_bitmap(PyTypeObject *type, PyObject *object, const char *format)
{
    if (Py_TYPE(object) == type)
        return 0;
    raise_type(format, object);
    return -1;
}

static int check_tuple(PyObject *object, const char *format)
{
    if (PyTuple_Check(object))
        return 0;
    raise_type(format, object);
    return -1;
}

static void raise_score(PyObject *object, int i, int j)
{
    PyObject *number = PyNumber_Index(object);
    PyObject *shown = number == NULL ? NULL : show_number(number);
    if (shown != NULL)
        PyErr_Format(PyExc_ValueError, "scores[%d][%d] is %U, not 0..%d", i, j, shown, MAX_SCORE);
    Py_XDECREF(shown);
    Py_XDECREF(number);
}

/* The score, or -1 with an exception set. */
static int read_score(PyObject *object, int i, int j)
{
    long score = PyLong_AsLongAndOverflow(object, &(int){0}); /* -1 if too large */
    if (score >= 0 && score <= MAX_SCORE)
        return (int)score;
    if (!PyErr_Occurred())
        raise_score(object, i, j);
    return -1;
}

static int check_score(const Scores *scores, int i, int j)
{
    int score = scores->score[i][j];
    if (i == j && score != 0)
        PyErr_Format(PyExc_ValueError, "scores[%d][%d] is %d, not 0", i, j, score);
    else if (i > j && score != scores->score[j][i])
        PyErr_Format(PyExc_ValueError, "scores[%d][%d] is %d, scores[%d][%d] is %d", i, j, score, j,
                     i, scores->score[j][i]);
    else
        return 0;
    return -1;
}

static int read_row(Scores *scores, int i, PyObject *row)
{
    if (check_tuple(row, "scores must hold tuples, not %U") < 0)
        return -1;
    if (PyTuple_Size(row) != scores->rows) {
        PyErr_Format(PyExc_ValueError, "row %d of scores has %zd columns, not %d", i,
                     PyTuple_Size(row), scores->rows);
        return -1;
    }
    for (int j = 0; j < scores->rows; j++) {
        scores->score[i][j] = read_score(PyTuple_GetItem(row, j), i, j);
        if (scores->score[i][j] < 0 || check_score(scores, i, j) < 0)
            return -1;
    }
    return 0;
}

static int read_scores(Scores *scores, PyObject *rows)
{
    if (check_tuple(rows, "scores must be a tuple, not %U") < 0)
        return -1;
    if (PyTuple_Size(rows) > MAX_ROWS) {
        PyErr_Format(PyExc_ValueError, "scores have %zd rows; at most %d are handled",
                     PyTuple_Size(rows), MAX_ROWS);
        return -1;
    }
    scores->rows = (int)PyTuple_Size(rows);
    for (int i = 0; i < scores->rows; i++)
        if (read_row(scores, i, PyTuple_GetItem(rows, i)) < 0)
            return -1;
    return 0;
}

static int check_members(PyTypeObject *type, int rows, const Bits *among, const Bits *include)
{
    Bits known = no_bits;
    if (rows > 0)
        bits_add_range(&known, 0, rows - 1);
    Bits beyond = bits_minus(among, &known), strange = bits_minus(include, among);
    if (!bits_equal(&beyond, &no_bits))
        raise_set(type, "ids %S of among are beyond the %d rows of scores", &beyond, rows);
    else if (!bits_equal(&strange, &no_bits))
        raise_set(type, "ids %S of include are not in among", &strange, 0);
    else
        return 0;
    return -1;
}

/* The count, or -1 with an exception set. */
static int read_subset_count(PyObject *number, const Bits *among, const Bits *include)
{
    int count = read_count(number, bits_count(among)), least = bits_count(include);
    if (count < 0 || count >= least)
        return count;
    PyErr_Format(PyExc_ValueError, "a choice of %d ids cannot hold the %d of include", count,
                 least);
    return -1;
}

static PyObject *subset(PyTypeObject *type, const Scores *scores, const Bits *among,
                        const Bits *include, PyObject *number)
{
    int64_t inner;
    Bits chosen = no_bits;
    if (check_members(type, scores->rows, among, include) < 0)
        return NULL;
    int count = read_subset_count(number, among, include);
    if (count < 0)
        return NULL;
    chosen.word[0] = choose_subset(scores, among->word[0], include->word[0], count, &inner);
    return Py_BuildValue("(NL)", bitmap_make(type, &chosen), (long long)inner);
}

static PyObject *search_choose_subset(PyObject *module, PyObject *args)
{
    PyTypeObject *type = bitmap_type(module);
    PyObject *rows, *among, *include, *count;
    Scores scores;
    if (!PyArg_UnpackTuple(args, "choose_subset", 4, 4, &rows, &among, &include, &count) ||
        check_bitmap(type, among, "among must be a Bitmap, not %U") < 0 ||
        check_bitmap(type, include, "include must be a Bitmap, not %U") < 0 ||
        read_scores(&scores, rows) < 0)
        return NULL;
    PyObject *number = PyNumber_Index(count), *made = NULL;
    if (number != NULL)
        made = subset(type, &scores, bits_of(among), bits_of(include), number);
    Py_XDECREF(number);
    return made;
}

typedef struct {
    const char *no_tuple, *no_bitmap, *empty, *overlap;
} SetErrors;

static const SetErrors core_errors = {
    "cores must be a tuple, not %U",
    "cores must hold Bitmaps, not %U",
    "core %d has no CPUs",
    "CPUs %S are in core %d and in an earlier one",
};

static const SetErrors cache_errors = {
    "caches must be a tuple, not %U",
    "caches must hold Bitmaps, not %U",
    "cache %d has no CPUs",
    "CPUs %S are in cache %d and in an earlier one",
};

static int check_set(PyTypeObject *type, const Sets *sets, const Bits *set, const SetErrors *errors)
{
    Bits both = bits_and(set, &sets->all);
    if (bits_equal(set, &no_bits))
        PyErr_Format(PyExc_ValueError, errors->empty, sets->count);
    else if (!bits_equal(&both, &no_bits))
        raise_set(type, errors->overlap, &both, sets->count);
    else
        return 0;
    return -1;
}

static int read_sets(Sets *sets, PyTypeObject *type, PyObject *tuple, const SetErrors *errors)
{
    sets->count = 0;
    sets->all = no_bits;
    if (check_tuple(tuple, errors->no_tuple) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (check_bitmap(type, item, errors->no_bitmap) < 0 ||
            check_set(type, sets, bits_of(item), errors) < 0)
            return -1;
        sets->set[sets->count++] = bits_of(item);
        bits_add_all(&sets->all, bits_of(item));
    }
    return 0;
}

static int add_cores(Cpus *cpus, PyTypeObject *type, const Sets *cores)
{
    Bits outside = bits_minus(cpus->free, &cores->all);
    if (!bits_equal(&outside, &no_bits)) {
        raise_set(type, "free CPUs %S are in no core", &outside, 0);
        return -1;
    }
    for (int i = 0; i < cores->count; i++) {
        int group = find_group(cpus, cores->set[i]);
        if (group < 0) {
            raise_set(type, "CPUs %S of core %d are not in one cache", cores->set[i], i);
            return -1;
        }
        add_core(cpus, cores->set[i], group);
    }
    return 0;
}

static PyObject *cpu_choice(PyTypeObject *type, Cpus *cpus, const Sets *cores, PyObject *number)
{
    Bits chosen;
    if (add_cores(cpus, type, cores) < 0)
        return NULL;
    int count = read_count(number, bits_count(cpus->free));
    if (count < 0)
        return NULL;
    return choose_cpus(&chosen, cpus, count) < 0 ? PyErr_NoMemory() : bitmap_make(type, &chosen);
}

static PyObject *grouped_choice(PyTypeObject *type, const Bits *free, const Sets *cores,
                                const Sets *caches, PyObject *number)
{
    Cpus cpus;
    Group *groups = PyMem_Malloc(((size_t)caches->count + 1) * sizeof(Group));
    if (groups == NULL)
        return PyErr_NoMemory();
    open_cpus(&cpus, free, caches, groups);
    PyObject *made = cpu_choice(type, &cpus, cores, number);
    PyMem_Free(groups);
    return made;
}

static PyObject *search_choose_cpus(PyObject *module, PyObject *args)
{
    PyTypeObject *type = bitmap_type(module);
    PyObject *free, *core_sets, *cache_sets, *count;
    Sets cores, caches;
    if (!PyArg_UnpackTuple(args, "choose_cpus", 4, 4, &free, &core_sets, &cache_sets, &count) ||
        check_bitmap(type, free, "free must be a Bitmap, not %U") < 0 ||
        read_sets(&cores, type, core_sets, &core_errors) < 0 ||
        read_sets(&caches, type, cache_sets, &cache_errors) < 0)
        return NULL;
    PyObject *number = PyNumber_Index(count), *made = NULL;
    if (number != NULL)
        made = grouped_choice(type, bits_of(free), &cores, &caches, number);
    Py_XDECREF(number);
    return made;
}

/* ---- for the module -------------------------------------------------------------------------- */

PyMethodDef search_methods[] = {
    {"choose_subset", search_choose_subset, METH_VARARGS,
     "choose_subset($module, scores, among, include, count, /)\n--\n\n"
     "The members of `among` with the best links inside, and the sum of these links."},
    {"choose_cpus", search_choose_cpus, METH_VARARGS,
     "choose_cpus($module, free, cores, caches, count, /)\n--\n\n"
     "The CPUs of `free` that break the fewest cores and touch the fewest caches."},
    {NULL, NULL, 0, NULL},
};

int search_add_constants(PyObject *module)
{
    return PyModule_AddIntConstant(module, "MAX_SUBSETS", MAX_SUBSETS);
}
