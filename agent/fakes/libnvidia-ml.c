/* A working stand-in for the GPU driver's library, libnvidia-ml.so.1.
 *
 * It answers from the text file that the environment variable NUMALET_FAKE_NVML names, and looks at
 * each call whether the file has changed, so that a test can break a GPU under a running process.
 * Without the file it is a driver that is not loaded. One fact a line:
 *
 *   driver 550.54.15
 *   gpu 0 uuid=GPU-5c9e bdf=0000:1a:00.0 minor=0 memory=85899345920 memory_nodes=0 cpus=0-31,64-95
 *       mig=0 events=0x1f pci=0x20b210de name=NVIDIA A800-SXM4-80GB    (one line; the name ends it)
 *   nvlink 0 3 gpu 0000:1b:00.0       link 3 of GPU 0 leads there; or: switch, npu, unknown, off
 *   ancestor 0 1 50                   nvmlDeviceGetTopologyCommonAncestor, both ways
 *   fail 3 nvmlDeviceGetUUID 15       an error for one GPU; * is any GPU or none
 *   fail * nvmlDeviceGetName 3        a call's name with or without its _v<n>; * is any call
 *   hang 2 nvmlDeviceGetMemoryInfo    no answer until this line is gone
 *   crash * nvmlInitWithFlags         abort()
 *   event 5 8 79                      GPU, event type, data; * is an event of no GPU; only append
 *
 * GPUs are numbered from 0 in order. A fact that is not there is one that the GPU does not support.
 * An event is delivered once to each set that was there before it, in order.
 * An unreadable line aborts: a slip in a test must not pass for a driver's answer.
 *
 * Functions, structs and numbers are those that nvidia-ml-py calls with. The mutex is held while a
 * call looks at the state and never while it waits.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    INSUFFICIENT_RESOURCES = 23,
};

enum { TO_GPU = 0, TO_NPU = 1, TO_SWITCH = 2, OFF = 3, TO_UNKNOWN = 255 };
enum { FAIL, HANG, CRASH };
enum { ABSENT = -1, ANY = -1, NO_GPU = -1, BAD_GPU = -2, MUST_WAIT = -3 };
enum { MAX_GPUS = 64, MAX_LINKS = 36, MAX_FAULTS = 1024, MAX_EVENTS = 4096, MAX_SETS = 16 };
enum { SET_WORDS = 16, TEXT = 96, NAP_MS = 5 };

typedef void *handle;

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};
struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct event_data {
    handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};
static_assert(sizeof(struct pci_info) == 68, "as nvmlPciInfo_t");
static_assert(sizeof(struct memory_v2) == 0x28, "as nvmlMemory_v2 says");
static_assert(sizeof(struct event_data) == 32, "as c_nvmlEventData_t");

struct address {
    bool known;
    unsigned domain, bus, device;
};
struct id_set {
    bool known;
    uint64_t words[SET_WORDS];
};
struct link {
    int to;
    struct address remote;
};
struct gpu {
    char uuid[TEXT], name[TEXT];
    struct address address;
    long minor, mig;
    unsigned pci_device_id;
    unsigned long long memory, events;
    struct id_set memory_nodes, cpus;
    unsigned links;
    struct link link[MAX_LINKS];
};
struct fault {
    int kind, gpu, code;
    char call[TEXT];
};
struct event {
    int gpu;
    unsigned long long type, data;
};
struct event_set {
    bool used;
    int next;                             /* the first line `event` that is still to be delivered */
    unsigned long long types[MAX_GPUS];
};

static struct {
    char driver[TEXT];
    int gpus, faults, events;
    struct gpu gpu[MAX_GPUS];
    int ancestor[MAX_GPUS][MAX_GPUS];
    struct fault fault[MAX_FAULTS];
    struct event event[MAX_EVENTS];
} state;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char path[4096];
static struct stat seen;
static int line_number;
static int users;                         /* nvmlInit less nvmlShutdown */
static struct event_set sets[MAX_SETS];
static char handles[MAX_GPUS];            /* a GPU's handle is its place in here */

/* --- the text file ----------------------------------------------------------------------------- */

static _Noreturn void reject(const char *why)
{
    fprintf(stderr, "fake libnvidia-ml: %s line %d: %s\n", path, line_number, why);
    abort();
}

static unsigned long long read_number(const char *text)
{
    char *end;
    unsigned long long number = text ? strtoull(text, &end, 0) : 0;
    if (!text || end == text || *end)
        reject("a number is missing or is none");
    return number;
}

static unsigned read_below(const char *text, unsigned limit)
{
    unsigned long long number = read_number(text);
    if (number >= limit)
        reject("a number is too large");
    return (unsigned)number;
}

static int read_gpu_index(const char *text)
{
    return text && !strcmp(text, "*") ? ANY : (int)read_below(text, MAX_GPUS);
}

static void read_text(char *into, const char *text)
{
    if (!text || strlen(text) >= TEXT)
        reject("a text is missing or too long");
    strcpy(into, text);
}

static bool parse_address(struct address *into, const char *text)
{
    unsigned function;
    int length = 0;
    into->known = text
        && sscanf(text, "%8x:%2x:%2x.%1x%n", &into->domain, &into->bus, &into->device, &function,
                  &length) == 4
        && !text[length];
    return into->known;
}

static void read_address(struct address *into, const char *text)
{
    if (!parse_address(into, text))
        reject("this is no PCI address");
}

/* "0-31,64-95"; empty text is the empty set */
static void read_ids(struct id_set *into, char *text)
{
    char *rest;
    into->known = true;
    for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        char *dash = strchr(part, '-');
        if (dash)
            *dash = '\0';
        unsigned first = read_below(part, SET_WORDS * 64);
        unsigned last = dash ? read_below(dash + 1, SET_WORDS * 64) : first;
        for (unsigned id = first; id <= last; id++)
            into->words[id / 64] |= UINT64_C(1) << id % 64;
    }
}

static void read_gpu_fact(struct gpu *gpu, const char *key, char *value)
{
    if (!strcmp(key, "uuid"))
        read_text(gpu->uuid, value);
    else if (!strcmp(key, "bdf"))
        read_address(&gpu->address, value);
    else if (!strcmp(key, "minor"))
        gpu->minor = (long)read_below(value, UINT32_MAX);
    else if (!strcmp(key, "memory"))
        gpu->memory = read_number(value);
    else if (!strcmp(key, "memory_nodes"))
        read_ids(&gpu->memory_nodes, value);
    else if (!strcmp(key, "cpus"))
        read_ids(&gpu->cpus, value);
    else if (!strcmp(key, "mig"))
        gpu->mig = (long)read_below(value, 2);
    else if (!strcmp(key, "events"))
        gpu->events = read_number(value);
    else if (!strcmp(key, "pci"))
        gpu->pci_device_id = read_below(value, UINT32_MAX);
    else
        reject("a GPU has no such fact");
}

static void read_gpu(char **rest)
{
    if ((int)read_below(strtok_r(NULL, " ", rest), MAX_GPUS) != state.gpus)
        reject("GPUs are numbered from 0 in order");
    struct gpu *gpu = &state.gpu[state.gpus++];
    gpu->minor = gpu->mig = ABSENT;
    for (char *word = strtok_r(NULL, " ", rest); word; word = strtok_r(NULL, " ", rest)) {
        char *value = strchr(word, '=');
        if (!value)
            reject("a fact is <key>=<value>");
        *value++ = '\0';
        if (strcmp(word, "name")) {
            read_gpu_fact(gpu, word, value);
            continue;
        }
        char *end = strtok_r(NULL, "", rest);
        if (snprintf(gpu->name, TEXT, end ? "%s %s" : "%s", value, end) >= TEXT)
            reject("a name is too long");
        return;
    }
}

static int read_target(const char *word)
{
    static const struct { const char *word; int to; } targets[] = {
        {"gpu", TO_GPU}, {"npu", TO_NPU}, {"switch", TO_SWITCH}, {"unknown", TO_UNKNOWN}, {"off", OFF},
    };
    for (size_t i = 0; word && i < sizeof targets / sizeof *targets; i++)
        if (!strcmp(word, targets[i].word))
            return targets[i].to;
    reject("a link leads to gpu, switch, npu, unknown or is off");
}

static void read_nvlink(char **rest)
{
    struct gpu *gpu = &state.gpu[read_below(strtok_r(NULL, " ", rest), MAX_GPUS)];
    unsigned number = read_below(strtok_r(NULL, " ", rest), MAX_LINKS);
    for (; gpu->links <= number; gpu->links++)
        gpu->link[gpu->links].to = OFF;
    gpu->link[number].to = read_target(strtok_r(NULL, " ", rest));
    char *remote = strtok_r(NULL, " ", rest);
    if (remote)
        read_address(&gpu->link[number].remote, remote);
}

static void read_ancestor(char **rest)
{
    unsigned a = read_below(strtok_r(NULL, " ", rest), MAX_GPUS);
    unsigned b = read_below(strtok_r(NULL, " ", rest), MAX_GPUS);
    state.ancestor[a][b] = state.ancestor[b][a] = (int)read_below(strtok_r(NULL, " ", rest), 1000);
}

static void read_fault(int kind, char **rest)
{
    if (state.faults == MAX_FAULTS)
        reject("too many faults");
    struct fault *fault = &state.fault[state.faults++];
    fault->kind = kind;
    fault->gpu = read_gpu_index(strtok_r(NULL, " ", rest));
    read_text(fault->call, strtok_r(NULL, " ", rest));
    fault->code = kind == FAIL ? (int)read_below(strtok_r(NULL, " ", rest), 1000) : 0;
}

static void read_event(char **rest)
{
    if (state.events == MAX_EVENTS)
        reject("too many events");
    struct event *event = &state.event[state.events++];
    event->gpu = read_gpu_index(strtok_r(NULL, " ", rest));
    event->type = read_number(strtok_r(NULL, " ", rest));
    event->data = read_number(strtok_r(NULL, " ", rest));
}

static void read_line(char *line)
{
    char *rest;
    line[strcspn(line, "\n")] = '\0';
    char *word = strtok_r(line, " ", &rest);
    if (!word || *word == '#')
        return;
    if (!strcmp(word, "driver"))
        read_text(state.driver, strtok_r(NULL, " ", &rest));
    else if (!strcmp(word, "gpu"))
        read_gpu(&rest);
    else if (!strcmp(word, "nvlink"))
        read_nvlink(&rest);
    else if (!strcmp(word, "ancestor"))
        read_ancestor(&rest);
    else if (!strcmp(word, "fail"))
        read_fault(FAIL, &rest);
    else if (!strcmp(word, "hang"))
        read_fault(HANG, &rest);
    else if (!strcmp(word, "crash"))
        read_fault(CRASH, &rest);
    else if (!strcmp(word, "event"))
        read_event(&rest);
    else
        reject("a line begins with driver, gpu, nvlink, ancestor, fail, hang, crash or event");
}

static void read_state(FILE *file)
{
    char *line = NULL;
    size_t room = 0;
    memset(&state, 0, sizeof state);
    for (int a = 0; a < MAX_GPUS; a++)
        for (int b = 0; b < MAX_GPUS; b++)
            state.ancestor[a][b] = ABSENT;
    for (line_number = 1; getline(&line, &room, file) >= 0; line_number++)
        read_line(line);
    free(line);
    for (int i = 0; i < MAX_SETS; i++)
        if (sets[i].next > state.events)
            sets[i].next = state.events;
}

static bool is_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size
        && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static int refresh(void)
{
    struct stat now;
    if (!stat(path, &now) && is_same_file(&now, &seen))
        return SUCCESS;
    FILE *file = fopen(path, "re");
    if (!file)
        return DRIVER_NOT_LOADED;
    fstat(fileno(file), &seen);
    read_state(file);
    fclose(file);
    return SUCCESS;
}

/* --- entering and leaving a call --------------------------------------------------------------- */

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = NAP_MS * 1000000L}, NULL);
}

/* whether `name` is `call`, with or without its version */
static bool is_call(const char *name, const char *call)
{
    size_t length = strlen(name);
    if (!strcmp(name, "*") || !strcmp(name, call))
        return true;
    return !strncmp(name, call, length) && !strncmp(call + length, "_v", 2);
}

static int fault_of(const char *call, int a, int b)
{
    for (int i = 0; i < state.faults; i++) {
        const struct fault *fault = &state.fault[i];
        if (!is_call(fault->call, call))
            continue;
        if (fault->gpu != ANY && fault->gpu != a && fault->gpu != b)
            continue;
        if (fault->kind == CRASH)
            abort();
        return fault->kind == HANG ? MUST_WAIT : fault->code;
    }
    return SUCCESS;
}

static int check(const char *call, int a, int b)
{
    int code = refresh();
    if (code)
        return code;
    if (a == BAD_GPU || a >= state.gpus || b == BAD_GPU || b >= state.gpus)
        return INVALID_ARGUMENT;
    return fault_of(call, a, b);
}

/* Holds the mutex if it returns SUCCESS; `end` then gives it back. */
static int begin_pair(const char *call, int a, int b)
{
    for (;;) {
        pthread_mutex_lock(&mutex);
        int code = users || !strcmp(call, "nvmlInitWithFlags") ? check(call, a, b) : UNINITIALIZED;
        if (!code)
            return SUCCESS;
        pthread_mutex_unlock(&mutex);
        if (code != MUST_WAIT)
            return code;
        nap();
    }
}

static int begin(const char *call)
{
    return begin_pair(call, NO_GPU, NO_GPU);
}

static int end(int code)
{
    pthread_mutex_unlock(&mutex);
    return code;
}

static int index_of(handle device)
{
    uintptr_t offset = (uintptr_t)device - (uintptr_t)handles;
    return offset < MAX_GPUS ? (int)offset : BAD_GPU;
}

static int begin_gpu(const char *call, handle device, struct gpu **gpu)
{
    int index = index_of(device);
    int code = begin_pair(call, index, NO_GPU);
    if (!code)
        *gpu = &state.gpu[index];
    return code;
}

static int give_text(const char *text, char *into, unsigned size)
{
    if (!*text)
        return NOT_SUPPORTED;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(into, text);
    return SUCCESS;
}

static int give_number(long number, unsigned *into)
{
    if (number == ABSENT)
        return NOT_SUPPORTED;
    *into = (unsigned)number;
    return SUCCESS;
}

static int give_address(const struct address *address, unsigned pci_device_id, struct pci_info *into)
{
    if (!address->known)
        return NOT_SUPPORTED;
    memset(into, 0, sizeof *into);
    into->domain = address->domain;
    into->bus = address->bus;
    into->device = address->device;
    into->pci_device_id = pci_device_id;
    snprintf(into->bus_id, sizeof into->bus_id, "%08X:%02X:%02X.0", address->domain,
             address->bus & 0xff, address->device & 0xff);
    snprintf(into->bus_id_legacy, sizeof into->bus_id_legacy, "%04X:%02X:%02X.0",
             address->domain & 0xffff, address->bus & 0xff, address->device & 0xff);
    return SUCCESS;
}

static int give_ids(const struct id_set *set, uint64_t *into, unsigned words)
{
    if (!set->known)
        return NOT_SUPPORTED;
    for (unsigned i = words; i < SET_WORDS; i++)
        if (set->words[i])
            return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < words; i++)
        into[i] = i < SET_WORDS ? set->words[i] : 0;
    return SUCCESS;
}

/* --- the library ------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&mutex);
    const char *name = getenv("NUMALET_FAKE_NVML");
    snprintf(path, sizeof path, "%s", name ? name : "");
    pthread_mutex_unlock(&mutex);
    int code = begin(__func__);
    if (code)
        return code;
    users++;
    return end(SUCCESS);
}

int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
    int code = begin(__func__);
    if (code)
        return code;
    if (!--users)
        memset(sets, 0, sizeof sets);
    return end(SUCCESS);
}

const char *nvmlErrorString(int code)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch", "In use",
        "Insufficient Memory", "No data", "vGPU ECC not supported", "Insufficient resources",
    };
    size_t known = sizeof texts / sizeof *texts;
    return code >= 0 && (size_t)code < known ? texts[code] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    int code = begin(__func__);
    return code ? code : end(give_text(state.driver, text, size));
}

int nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
    char version[TEXT + 8];
    int code = begin(__func__);
    if (code)
        return code;
    snprintf(version, sizeof version, "12.%s", state.driver);
    return end(give_text(version, text, size));
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int code = begin(__func__);
    return code ? code : end(give_number(state.gpus, count));
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *device)
{
    struct gpu *gpu;
    handle found = index < MAX_GPUS ? &handles[index] : NULL;
    int code = begin_gpu(__func__, found, &gpu);
    if (code)
        return code;
    *device = found;
    return end(SUCCESS);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, handle *device)
{
    int code = begin(__func__);
    if (code)
        return code;
    for (int i = 0; i < state.gpus; i++)
        if (!strcmp(state.gpu[i].uuid, uuid)) {
            *device = &handles[i];
            return end(SUCCESS);
        }
    return end(NOT_FOUND);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, handle *device)
{
    struct address wanted;
    int code = begin(__func__);
    if (code)
        return code;
    if (!parse_address(&wanted, bus_id))
        return end(INVALID_ARGUMENT);
    for (int i = 0; i < state.gpus; i++) {
        const struct address *address = &state.gpu[i].address;
        if (address->known && address->domain == wanted.domain && address->bus == wanted.bus
            && address->device == wanted.device) {
            *device = &handles[i];
            return end(SUCCESS);
        }
    }
    return end(NOT_FOUND);
}

int nvmlDeviceGetUUID(handle device, char *text, unsigned size)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    return code ? code : end(give_text(gpu->uuid, text, size));
}

int nvmlDeviceGetName(handle device, char *text, unsigned size)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    return code ? code : end(give_text(gpu->name, text, size));
}

int nvmlDeviceGetMinorNumber(handle device, unsigned *minor)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    return code ? code : end(give_number(gpu->minor, minor));
}

int nvmlDeviceGetPciInfo_v3(handle device, struct pci_info *info)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    return code ? code : end(give_address(&gpu->address, gpu->pci_device_id, info));
}

int nvmlDeviceGetMemoryInfo(handle device, struct memory *memory)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    if (!gpu->memory)
        return end(NOT_SUPPORTED);
    *memory = (struct memory){.total = gpu->memory, .free = gpu->memory};
    return end(SUCCESS);
}

int nvmlDeviceGetMemoryInfo_v2(handle device, struct memory_v2 *memory)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    if (!gpu->memory)
        return end(NOT_SUPPORTED);
    memory->total = memory->free = gpu->memory;
    memory->reserved = memory->used = 0;
    return end(SUCCESS);
}

int nvmlDeviceGetMemoryAffinity(handle device, unsigned words, uint64_t *nodes, unsigned scope)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    return end(scope > 1 ? INVALID_ARGUMENT : give_ids(&gpu->memory_nodes, nodes, words));
}

int nvmlDeviceGetCpuAffinityWithinScope(handle device, unsigned words, uint64_t *cpus, unsigned scope)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    return end(scope > 1 ? INVALID_ARGUMENT : give_ids(&gpu->cpus, cpus, words));
}

int nvmlDeviceGetCpuAffinity(handle device, unsigned words, uint64_t *cpus)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    return code ? code : end(give_ids(&gpu->cpus, cpus, words));
}

int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    code = give_number(gpu->mig, current);
    return end(code ? code : give_number(gpu->mig, pending));
}

int nvmlDeviceGetTopologyCommonAncestor(handle one, handle other, unsigned *level)
{
    int a = index_of(one), b = index_of(other);
    int code = begin_pair(__func__, a, b);
    return code ? code : end(give_number(a == b ? 0 : state.ancestor[a][b], level));
}

static int begin_link(const char *call, handle device, unsigned number, struct link **link)
{
    struct gpu *gpu;
    int code = begin_gpu(call, device, &gpu);
    if (code)
        return code;
    if (!gpu->links)
        return end(NOT_SUPPORTED);
    if (number >= gpu->links)
        return end(INVALID_ARGUMENT);
    *link = &gpu->link[number];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(handle device, unsigned number, unsigned *active)
{
    struct link *link;
    int code = begin_link(__func__, device, number, &link);
    return code ? code : end(give_number(link->to != OFF, active));
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle device, unsigned number, struct pci_info *info)
{
    struct link *link;
    int code = begin_link(__func__, device, number, &link);
    return code ? code : end(give_address(&link->remote, 0, info));
}

int nvmlDeviceGetNvLinkRemoteDeviceType(handle device, unsigned number, unsigned *type)
{
    struct link *link;
    int code = begin_link(__func__, device, number, &link);
    if (code)
        return code;
    return end(link->to == OFF ? NOT_SUPPORTED : give_number(link->to, type));
}

/* --- events ------------------------------------------------------------------------------------ */

static bool is_set(const struct event_set *set)
{
    for (int i = 0; i < MAX_SETS; i++)
        if (set == &sets[i])
            return set->used;
    return false;
}

int nvmlEventSetCreate(struct event_set **set)
{
    int code = begin(__func__);
    if (code)
        return code;
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].used) {
            sets[i] = (struct event_set){.used = true, .next = state.events};
            *set = &sets[i];
            return end(SUCCESS);
        }
    return end(INSUFFICIENT_RESOURCES);
}

int nvmlEventSetFree(struct event_set *set)
{
    int code = begin(__func__);
    if (code)
        return code;
    if (!is_set(set))
        return end(INVALID_ARGUMENT);
    set->used = false;
    return end(SUCCESS);
}

int nvmlDeviceGetSupportedEventTypes(handle device, unsigned long long *types)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    *types = gpu->events;
    return end(gpu->events ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceRegisterEvents(handle device, unsigned long long types, struct event_set *set)
{
    struct gpu *gpu;
    int code = begin_gpu(__func__, device, &gpu);
    if (code)
        return code;
    if (!is_set(set))
        return end(INVALID_ARGUMENT);
    if (types & ~gpu->events)
        return end(NOT_SUPPORTED);
    set->types[index_of(device)] |= types;
    return end(SUCCESS);
}

static bool is_registered(const struct event_set *set, const struct event *event)
{
    unsigned long long types = 0;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        if (event->gpu == ANY || event->gpu == gpu)
            types |= set->types[gpu];
    return types & event->type;
}

/* The next line for which `set` is registered; lines for which it is not are passed over. */
static int take_event(struct event_set *set, struct event_data *data)
{
    if (!is_set(set))
        return INVALID_ARGUMENT;
    while (set->next < state.events) {
        const struct event *event = &state.event[set->next++];
        if (!is_registered(set, event))
            continue;
        *data = (struct event_data){
            .device = event->gpu == ANY ? NULL : &handles[event->gpu],
            .type = event->type,
            .data = event->data,
            .gpu_instance = UINT32_MAX,
            .compute_instance = UINT32_MAX,
        };
        return SUCCESS;
    }
    return TIMEOUT;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A descriptor that tells of changes in the text file's folder, or -1. */
static int open_watch(void)
{
    char folder[sizeof path];
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    strcpy(folder, path);
    if (watch >= 0
        && inotify_add_watch(watch, dirname(folder), IN_MOVED_TO | IN_CLOSE_WRITE | IN_DELETE) < 0) {
        close(watch);
        return -1;
    }
    return watch;
}

static void await_change(int watch, int64_t timeout_ms)
{
    char changes[4096];
    if (watch < 0 && timeout_ms > NAP_MS)
        timeout_ms = NAP_MS;
    poll(&(struct pollfd){.fd = watch, .events = POLLIN}, 1, timeout_ms > 0 ? (int)timeout_ms : 0);
    while (read(watch, changes, sizeof changes) > 0)
        continue;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned timeout_ms)
{
    int64_t until = now_ms() + timeout_ms;
    int watch = open_watch();
    for (;;) {
        int code = begin(__func__);
        if (!code)
            code = end(take_event(set, data));
        if (code != TIMEOUT || now_ms() >= until) {
            close(watch);
            return code;
        }
        await_change(watch, until - now_ms());
    }
}
