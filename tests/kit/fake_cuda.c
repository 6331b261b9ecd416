/* A libcuda.so.1 for machines without a GPU: the part of the CUDA driver API with which code that launches kernels runs.

   Device memory is host memory. Copies and memsets are carried out at once, kernels are only counted, so a wait that
   is missing goes unnoticed. Captured work becomes nodes of a graph, and the rules of captures hold as the real driver
   has them. Handles are never freed, so a call that gets a destroyed one returns CUDA_ERROR_INVALID_HANDLE.

   FAKE_CUDA_DEVICES: the number of devices, 1 by default. fake_*, at the end: the hooks of tests. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long Address; /* CUdeviceptr */

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908
};
enum { DEVICES = 16, PROCESSORS = 132, BRANCHES = 8, CAPTURES = 64, STACK = 16, LAUNCHES = 1024 };
enum { STREAM = 1, EVENT, MODULE, FUNCTION, GRAPH, EXEC, CONTEXT }; /* tags of handles, 0: destroyed */
enum { GLOBAL, THREAD_LOCAL, RELAXED };                             /* modes of a capture */
static const size_t MEMORY = 80ul << 30;

struct context { int tag, device, retained; };
struct function { int tag; char name[2048]; int shared_max; struct function *next; };
struct module { int tag; size_t size; char *image; struct function *functions; };
struct launch { struct function *function; unsigned grid[3], block[3], shared; Address stream; void **arguments; };
struct node { enum { KERNEL, COPY, SET } kind; Address to, from; size_t count; unsigned value, width; struct launch launch;
              struct node *origin; };
struct graph { int tag; size_t count, room; struct node **nodes; };
/* Each stream of a capture is a branch. clock[b] nodes of branch b come before a stream's, or an event's, next node. */
struct capture { int active, invalid, mode, branches; pthread_t thread; struct stream *streams[BRANCHES];
                 struct graph *graph; };
struct stream { int tag, device, flags, priority, branch; struct capture *capture; unsigned long clock[BRANCHES]; };
struct event { int tag, flags, recorded; struct capture *capture; unsigned long clock[BRANCHES]; struct timespec time; };
struct block { Address at; size_t size; int host, device; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialized, devices = 1;
static struct context contexts[DEVICES];
static struct stream legacy = {.tag = STREAM}, per_thread = {.tag = STREAM};
static struct capture *captures[CAPTURES]; /* under way: all below captures_end, which calls search each time */
static int captures_end;
static struct block *blocks;               /* allocations, by address */
static size_t block_count, block_room, allocated[DEVICES];
static struct launch launches[LAUNCHES]; /* the last ones, a ring */
static unsigned long launch_count;
static __thread struct context *stack[STACK];
static __thread int depth, thread_mode = GLOBAL;

/* --- calls: each has an entry in a table (a section of this library), where cuGetProcAddress and the hooks find it --- */

struct call { const char *name; int since, needs; void *function; unsigned long calls; int fail_code, fail_times; };
extern struct call *__start_fake_calls_table[], *__stop_fake_calls_table[];
#define EACH_CALL(c) for (struct call **c = __start_fake_calls_table; c < __stop_fake_calls_table; c++)

/* What a call needs: cuInit, a current context; SAFE: no capture that forbids calls which may wait for the device. */
enum { NOTHING = 0, INIT = 1, CURRENT = 3, SAFE = 4 };

#define ENTRY(id, name, since, needs, symbol)                                          \
    static struct call of_##id = {#name, since, needs, (void *)symbol, 0, 0, 0};       \
    static struct call *in_table_##id __attribute__((section("fake_calls_table"), used)) = &of_##id;
/* Define `symbol`, which cuGetProcAddress gives for `name` from CUDA version `since` on. BEGIN(symbol) must come first. */
#define CALL_AS(symbol, name, since, needs, ...) \
    int symbol(__VA_ARGS__);                     \
    ENTRY(symbol, name, since, needs, symbol)    \
    int symbol(__VA_ARGS__)
#define CALL(name, since, needs, ...) CALL_AS(name, name, since, needs, __VA_ARGS__)
#define BEGIN(symbol)                                                                          \
    __attribute__((cleanup(unlock))) pthread_mutex_t *held = (pthread_mutex_lock(&mutex), &mutex); \
    int refused = begin(&of_##symbol);                                                         \
    if (refused) return (void)held, refused
#define TRY(expression) do { int code_ = (expression); if (code_) return code_; } while (0)
#define REQUIRE(condition, code) do { if (!(condition)) return (code); } while (0)

static void unlock(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }

static int here(void) { return depth ? stack[depth - 1]->device : 0; }

/* A capture that meets a forbidden call is invalid: its streams refuse work, and its end gives no graph. */
static int invalidate(struct capture *capture, int code) { capture->invalid = 1; return code; }

/* While a blocking stream is captured, the legacy stream would have to wait for it. */
static int legacy_allowed(int spare) {
    for (int i = 0; i < captures_end; i++)
        for (int b = 0; captures[i] && b < captures[i]->branches; b++)
            if (captures[i]->streams[b] && !(captures[i]->streams[b]->flags & 1)) /* not CU_STREAM_NON_BLOCKING */
                return spare ? CAPTURE_IMPLICIT : invalidate(captures[i], CAPTURE_IMPLICIT);
    return SUCCESS;
}

/* The rule of cuThreadExchangeStreamCaptureMode: a thread may not make potentially unsafe calls (allocations, waits,
   queries) during its own captures, but relaxed ones, nor (in mode GLOBAL) during another thread's of mode GLOBAL. */
static int calls_allowed(void) {
    int code = SUCCESS;
    for (int i = 0; i < captures_end && thread_mode != RELAXED; i++) {
        struct capture *capture = captures[i];
        if (!capture || capture->mode == RELAXED) continue;
        if (pthread_equal(capture->thread, pthread_self()) || (capture->mode == GLOBAL && thread_mode == GLOBAL))
            code = invalidate(capture, CAPTURE_UNSUPPORTED);
    }
    return code;
}

static int begin(struct call *call) {
    call->calls++;
    if (call->fail_times > 0) return call->fail_times--, call->fail_code;
    REQUIRE(initialized || !(call->needs & INIT), NOT_INITIALIZED);
    if ((call->needs & CURRENT) == CURRENT) {
        REQUIRE(depth, INVALID_CONTEXT);
        REQUIRE(stack[depth - 1]->retained, CONTEXT_IS_DESTROYED);
    }
    return call->needs & SAFE ? calls_allowed() : SUCCESS;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status);
ENTRY(cuGetProcAddress_v2, cuGetProcAddress, 12000, NOTHING, cuGetProcAddress_v2)
/* Flag 2 asks for variants whose stream 0 is the thread's own. They are the same functions here. */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status) {
    struct call *best = NULL;
    int known = 0;
    EACH_CALL(c) {
        if (strcmp((*c)->name, name)) continue;
        known = 1;
        if ((*c)->since <= version && (!best || (*c)->since > best->since)) best = *c;
    }
    *function = best ? best->function : NULL;
    if (status) *status = best ? 0 : known ? 2 : 1;
    return best ? SUCCESS : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags)
{ return cuGetProcAddress_v2(name, function, version, flags, NULL); }

/* cuda.bindings has the names of errors itself. */
CALL(cuGetErrorName, 6000, NOTHING, int code, const char **name)
{ BEGIN(cuGetErrorName); *name = "an error of the fake driver"; return SUCCESS; }
ENTRY(error_string, cuGetErrorString, 6000, NOTHING, cuGetErrorName)

/* --- devices and contexts: each device has its primary context, and no other --- */

CALL(cuInit, 2000, NOTHING, unsigned flags) {
    BEGIN(cuInit);
    REQUIRE(!flags, INVALID_VALUE);
    const char *wanted = getenv("FAKE_CUDA_DEVICES");
    devices = wanted ? atoi(wanted) : 1;
    if (devices < 1 || devices > DEVICES) return 100; /* CUDA_ERROR_NO_DEVICE */
    for (int i = 0; i < devices; i++) contexts[i].tag = CONTEXT, contexts[i].device = i;
    initialized = 1;
    return SUCCESS;
}

static int attribute(int which, int device) {
    static const struct { int which, value; } values[] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, /* blocks and grids at most */
        {8, 49152}, {9, 65536}, {10, 32}, {12, 65536}, {13, 1980000}, {16, PROCESSORS}, {19, 1}, {31, 1}, {37, 5120},
        {38, 50 << 20}, {39, 2048}, {40, 3}, {41, 1}, {75, 9}, {76, 0}, {78, 1}, {81, 233472}, {82, 65536}, {83, 1},
        {95, 1}, {97, 232448}, {106, 32}, {111, 1024}};
    if (which == 33) return device + 1; /* PCI_BUS_ID */
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) if (values[i].which == which) return values[i].value;
    return 0;
}

/* Calls that only check a device and give a value. */
#define DEVICE_CALL(symbol, name, since, condition, set, ...) \
    CALL_AS(symbol, name, since, INIT, __VA_ARGS__)           \
    { BEGIN(symbol); REQUIRE(condition, INVALID_DEVICE); set; return SUCCESS; }
#define IS_DEVICE (device >= 0 && device < devices)
#define PRIMARY (&contexts[device])
DEVICE_CALL(cuDeviceGetCount, cuDeviceGetCount, 2000, 1, *count = devices, int *count)
DEVICE_CALL(cuDeviceGet, cuDeviceGet, 2000, IS_DEVICE, *handle = device, int *handle, int device)
DEVICE_CALL(cuDeviceGetName, cuDeviceGetName, 2000, IS_DEVICE, snprintf(name, room, "Fake H100"), char *name, int room,
            int device)
DEVICE_CALL(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, IS_DEVICE, *size = MEMORY, size_t *size, int device)
DEVICE_CALL(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, IS_DEVICE, *value = attribute(which, device), int *value,
            int which, int device)
DEVICE_CALL(cuDeviceGetUuid_v2, cuDeviceGetUuid, 9020, IS_DEVICE, (memset(uuid, 0xfa, 16), uuid[15] = (char)device),
            char *uuid, int device)
DEVICE_CALL(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, IS_DEVICE,
            snprintf(name, room, "0000:%02x:00.0", device + 1), char *name, int room, int device)
DEVICE_CALL(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000, IS_DEVICE, *can = 0, int *can, int device, int other)
DEVICE_CALL(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, IS_DEVICE,
            (PRIMARY->retained++, *context = PRIMARY), struct context **context, int device)
DEVICE_CALL(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, IS_DEVICE,
            (*flags = 0, *active = PRIMARY->retained > 0), int device, unsigned *flags, int *active)
DEVICE_CALL(cuDevicePrimaryCtxSetFlags_v2, cuDevicePrimaryCtxSetFlags, 7000, IS_DEVICE, , int device, unsigned flags)
DEVICE_CALL(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 7000, IS_DEVICE, PRIMARY->retained = 0, int device)
DEVICE_CALL(cuCtxGetCurrent, cuCtxGetCurrent, 4000, 1, *context = depth ? stack[depth - 1] : NULL,
            struct context **context)
CALL(cuDriverGetVersion, 2020, NOTHING, int *version) { BEGIN(cuDriverGetVersion); *version = 13000; return SUCCESS; }
CALL_AS(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 7000, INIT, int device) {
    BEGIN(cuDevicePrimaryCtxRelease_v2); REQUIRE(IS_DEVICE, INVALID_DEVICE);
    REQUIRE(PRIMARY->retained, INVALID_CONTEXT); PRIMARY->retained--; return SUCCESS;
}

#define IS(object, kind) ((object) && (object)->tag == (kind))
static int push(struct context *context) {
    REQUIRE(IS(context, CONTEXT), INVALID_CONTEXT); REQUIRE(depth < STACK, INVALID_VALUE);
    stack[depth++] = context; return SUCCESS;
}
CALL_AS(cuCtxPushCurrent_v2, cuCtxPushCurrent, 4000, INIT, struct context *context)
{ BEGIN(cuCtxPushCurrent_v2); return push(context); }
CALL_AS(cuCtxPopCurrent_v2, cuCtxPopCurrent, 4000, INIT, struct context **context)
{ BEGIN(cuCtxPopCurrent_v2); REQUIRE(depth, INVALID_CONTEXT); depth--; if (context) *context = stack[depth]; return SUCCESS; }
/* Replace the top of the stack. NULL pops it. */
CALL(cuCtxSetCurrent, 4000, INIT, struct context *context) {
    BEGIN(cuCtxSetCurrent); REQUIRE(!context || IS(context, CONTEXT), INVALID_CONTEXT);
    if (depth) depth--;
    return context ? push(context) : SUCCESS;
}
CALL(cuCtxGetDevice, 2000, CURRENT, int *device) { BEGIN(cuCtxGetDevice); *device = here(); return SUCCESS; }
CALL_AS(cuCtxGetDevice_v2, cuCtxGetDevice, 13000, INIT, int *device, struct context *context) {
    BEGIN(cuCtxGetDevice_v2); REQUIRE(context ? context->tag == CONTEXT : depth, INVALID_CONTEXT);
    *device = context ? context->device : here(); return SUCCESS;
}
/* A context with a captured stream cannot be waited for, in any mode. */
CALL(cuCtxSynchronize, 2000, CURRENT, void) {
    BEGIN(cuCtxSynchronize); int code = SUCCESS;
    for (int i = 0; i < captures_end; i++) if (captures[i]) code = invalidate(captures[i], CAPTURE_UNSUPPORTED);
    return code;
}
CALL(cuCtxGetStreamPriorityRange, 5050, CURRENT, int *least, int *greatest)
{ BEGIN(cuCtxGetStreamPriorityRange); if (least) *least = 0; if (greatest) *greatest = -5; return SUCCESS; }

/* --- memory --- */

/* Return the index of the first block that ends beyond `at`. */
static size_t block_from(Address at) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].at + blocks[middle].size > at) high = middle; else low = middle + 1;
    }
    return low;
}
static struct block *block_of(Address at)
{ size_t i = block_from(at); return i < block_count && blocks[i].at <= at ? &blocks[i] : NULL; }
static void block_add(Address at, size_t size, int host) {
    if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 64) * sizeof *blocks);
    size_t i = block_from(at); memmove(&blocks[i + 1], &blocks[i], (block_count++ - i) * sizeof *blocks);
    blocks[i] = (struct block){at, size, host, here()};
}
static int block_remove(Address at, int host, int code) {
    struct block *block = block_of(at);
    REQUIRE(block && block->at == at && block->host == host, code);
    if (!host) allocated[block->device] -= block->size;
    if (host != 2) free((void *)at); /* 2: registered, so the caller's */
    memmove(block, block + 1, (--block_count - (size_t)(block - blocks)) * sizeof *blocks);
    return SUCCESS;
}
static int block_new(Address *address, size_t size, int host) {
    REQUIRE(address && size, INVALID_VALUE);
    REQUIRE(host || size <= MEMORY - allocated[here()], OUT_OF_MEMORY);
    void *memory = aligned_alloc(256, (size + 255) / 256 * 256);
    REQUIRE(memory, OUT_OF_MEMORY);
    memset(memory, 0xa5, size < 1 << 20 ? size : 1 << 20); /* a device's new memory has any content */
    *address = (Address)memory;
    block_add(*address, size, host);
    if (!host) allocated[here()] += size;
    return SUCCESS;
}

CALL_AS(cuMemAlloc_v2, cuMemAlloc, 3020, CURRENT | SAFE, Address *address, size_t size)
{ BEGIN(cuMemAlloc_v2); return block_new(address, size, 0); }
CALL_AS(cuMemFree_v2, cuMemFree, 3020, CURRENT | SAFE, Address address)
{ BEGIN(cuMemFree_v2); return address ? block_remove(address, 0, INVALID_VALUE) : SUCCESS; }
CALL(cuMemHostAlloc, 2020, CURRENT | SAFE, Address *address, size_t size, unsigned flags)
{ BEGIN(cuMemHostAlloc); return block_new(address, size, 1); }
CALL(cuMemFreeHost, 2000, CURRENT | SAFE, Address address)
{ BEGIN(cuMemFreeHost); return block_remove(address, 1, INVALID_VALUE); }
CALL_AS(cuMemHostRegister_v2, cuMemHostRegister, 4000, CURRENT | SAFE, Address address, size_t size, unsigned flags) {
    BEGIN(cuMemHostRegister_v2); REQUIRE(address && size, INVALID_VALUE); size_t i = block_from(address);
    REQUIRE(i == block_count || blocks[i].at >= address + size, ALREADY_REGISTERED);
    block_add(address, size, 2); return SUCCESS;
}
CALL(cuMemHostUnregister, 4000, CURRENT | SAFE, Address address)
{ BEGIN(cuMemHostUnregister); return block_remove(address, 2, NOT_REGISTERED); }
CALL_AS(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer, 3020, CURRENT, Address *device, Address host, unsigned flags) {
    BEGIN(cuMemHostGetDevicePointer_v2); struct block *block = block_of(host);
    REQUIRE(block && block->host, INVALID_VALUE); *device = host; return SUCCESS;
}
CALL_AS(cuMemGetInfo_v2, cuMemGetInfo, 3020, CURRENT, size_t *left, size_t *total)
{ BEGIN(cuMemGetInfo_v2); *total = MEMORY, *left = MEMORY - allocated[here()]; return SUCCESS; }
CALL_AS(cuMemGetAddressRange_v2, cuMemGetAddressRange, 3020, CURRENT, Address *base, size_t *size, Address address) {
    BEGIN(cuMemGetAddressRange_v2); struct block *block = block_of(address); REQUIRE(block, NOT_FOUND);
    if (base) *base = block->at;
    if (size) *size = block->size;
    return SUCCESS;
}
CALL(cuPointerGetAttribute, 4000, CURRENT, void *value, int which, Address address) {
    BEGIN(cuPointerGetAttribute);
    struct block *block = block_of(address);
    REQUIRE(block, INVALID_VALUE);
    if (which == 1) *(struct context **)value = &contexts[block->device];
    else if (which == 2) *(unsigned *)value = block->host ? 1 : 2; /* CU_MEMORYTYPE_HOST, _DEVICE */
    else if (which == 3 || which == 4) *(Address *)value = address; /* device, host pointer */
    else if (which == 9) *(int *)value = block->device;
    else return INVALID_VALUE;
    return SUCCESS;
}

/* --- work on streams --- */

static int find_stream(struct stream **found, struct stream *handle) {
    *found = (Address)handle <= 1 ? &legacy : (Address)handle == 2 ? &per_thread : handle;
    return (*found)->tag == STREAM ? SUCCESS : INVALID_HANDLE;
}
/* Find a stream that is to take work. */
static int find_ready(struct stream **found, struct stream *handle) {
    TRY(find_stream(found, handle));
    if (*found == &legacy) return legacy_allowed(0);
    return (*found)->capture && (*found)->capture->invalid ? CAPTURE_INVALIDATED : SUCCESS;
}

static void add_node(struct graph *graph, struct node node, struct node *origin) {
    if (graph->count == graph->room)
        graph->nodes = realloc(graph->nodes, (graph->room = 2 * graph->room + 16) * sizeof(void *));
    struct node *copy = malloc(sizeof *copy); *copy = node, copy->origin = origin;
    graph->nodes[graph->count++] = copy;
}

/* Memory that this library did not allocate may be a test's, so only the ends of known allocations are checked. */
static int inside(Address at, size_t size)
{ struct block *block = block_of(at); return at && (!block || at + size <= block->at + block->size); }

/* Carry out a node, or add it to the graph while the stream is captured. */
static int enqueue(struct stream *handle, struct node node) {
    struct stream *stream;
    TRY(find_ready(&stream, handle));
    if (node.kind == KERNEL) REQUIRE(IS(node.launch.function, FUNCTION), INVALID_HANDLE);
    else if (!node.count) return SUCCESS;
    else REQUIRE(inside(node.to, node.count * node.width) && (node.kind == SET || inside(node.from, node.count)),
                 INVALID_VALUE);
    node.launch.stream = (Address)handle;
    if (stream->capture) {
        stream->clock[stream->branch]++;
        add_node(stream->capture->graph, node, NULL);
    } else if (node.kind == KERNEL) launches[launch_count++ % LAUNCHES] = node.launch;
    else if (node.kind == COPY) memmove((void *)node.to, (void *)node.from, node.count);
    else if (node.width == 1) memset((void *)node.to, (int)node.value, node.count);
    else for (size_t i = 0; i < node.count; i++) memcpy((char *)node.to + i * node.width, &node.value, node.width);
    return SUCCESS;
}

/* A synchronous call takes the legacy stream and waits. With a capture of a blocking stream it is an implicit
   dependency, with another one a potentially unsafe call. */
static int enqueue_waiting(struct node node) { TRY(legacy_allowed(0)); TRY(calls_allowed()); return enqueue(NULL, node); }
#define COPY_NODE ((struct node){.kind = COPY, .to = to, .from = from, .count = size, .width = 1})
#define SET_NODE(bytes) ((struct node){.kind = SET, .to = to, .value = value, .count = count, .width = bytes})
#define COPY_CALLS(name, suffix)                                                                                   \
    CALL_AS(name##suffix, name, 3020, CURRENT, Address to, Address from, size_t size)                              \
    { BEGIN(name##suffix); return enqueue_waiting(COPY_NODE); }                                                    \
    CALL_AS(name##Async##suffix, name##Async, 3020, CURRENT, Address to, Address from, size_t size, struct stream *stream) \
    { BEGIN(name##Async##suffix); return enqueue(stream, COPY_NODE); }
#define SET_CALLS(name, bytes)                                                                                     \
    CALL_AS(name##_v2, name, 3020, CURRENT, Address to, unsigned value, size_t count)                              \
    { BEGIN(name##_v2); REQUIRE(to % bytes == 0, INVALID_VALUE); return enqueue_waiting(SET_NODE(bytes)); }        \
    CALL(name##Async, 3020, CURRENT, Address to, unsigned value, size_t count, struct stream *stream)              \
    { BEGIN(name##Async); REQUIRE(to % bytes == 0, INVALID_VALUE); return enqueue(stream, SET_NODE(bytes)); }
COPY_CALLS(cuMemcpyHtoD, _v2)
COPY_CALLS(cuMemcpyDtoH, _v2)
COPY_CALLS(cuMemcpyDtoD, _v2)
COPY_CALLS(cuMemcpy, )
SET_CALLS(cuMemsetD8, 1)
SET_CALLS(cuMemsetD16, 2)
SET_CALLS(cuMemsetD32, 4)

static int create_stream(struct stream **stream, unsigned flags, int priority) {
    REQUIRE(stream && flags <= 1, INVALID_VALUE); *stream = calloc(1, sizeof **stream);
    (*stream)->tag = STREAM, (*stream)->flags = (int)flags, (*stream)->device = here();
    (*stream)->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority; return SUCCESS;
}
CALL(cuStreamCreate, 2000, CURRENT, struct stream **stream, unsigned flags)
{ BEGIN(cuStreamCreate); return create_stream(stream, flags, 0); }
CALL(cuStreamCreateWithPriority, 5050, CURRENT, struct stream **stream, unsigned flags, int priority)
{ BEGIN(cuStreamCreateWithPriority); return create_stream(stream, flags, priority); }
CALL_AS(cuStreamDestroy_v2, cuStreamDestroy, 4000, INIT, struct stream *stream) {
    BEGIN(cuStreamDestroy_v2); REQUIRE((Address)stream > 2 && stream->tag == STREAM, INVALID_HANDLE);
    if (stream->capture) stream->capture->streams[stream->branch] = NULL, stream->capture->invalid = 1;
    stream->tag = 0; return SUCCESS;
}
/* A captured stream has no work that runs, so it cannot be waited for. */
static int wait_stream(struct stream *handle) {
    struct stream *stream; TRY(find_ready(&stream, handle));
    return stream->capture ? invalidate(stream->capture, CAPTURE_UNSUPPORTED) : calls_allowed();
}
CALL(cuStreamSynchronize, 2000, CURRENT, struct stream *stream) { BEGIN(cuStreamSynchronize); return wait_stream(stream); }
CALL(cuStreamQuery, 2000, CURRENT, struct stream *stream) { BEGIN(cuStreamQuery); return wait_stream(stream); }
#define STREAM_GETTER(name, since, type, expression)                            \
    CALL(name, since, CURRENT, struct stream *handle, type *value)              \
    { BEGIN(name); struct stream *stream; TRY(find_stream(&stream, handle)); *value = expression; return SUCCESS; }
STREAM_GETTER(cuStreamGetFlags, 5050, unsigned, (unsigned)stream->flags)
STREAM_GETTER(cuStreamGetPriority, 5050, int, stream->priority)
STREAM_GETTER(cuStreamGetId, 12000, Address, (Address)stream)
STREAM_GETTER(cuStreamGetCtx, 9020, struct context *, handle == stream ? &contexts[stream->device] : stack[depth - 1])
STREAM_GETTER(cuStreamGetDevice, 12080, int, handle == stream ? stream->device : here())

CALL(cuEventCreate, 2000, CURRENT, struct event **event, unsigned flags) {
    BEGIN(cuEventCreate); REQUIRE(event && flags < 8, INVALID_VALUE); *event = calloc(1, sizeof **event);
    (*event)->tag = EVENT, (*event)->flags = (int)flags; return SUCCESS;
}
CALL_AS(cuEventDestroy_v2, cuEventDestroy, 4000, INIT, struct event *event)
{ BEGIN(cuEventDestroy_v2); REQUIRE(IS(event, EVENT), INVALID_HANDLE); event->tag = 0; return SUCCESS; }
CALL(cuEventRecord, 2000, CURRENT, struct event *event, struct stream *handle) {
    BEGIN(cuEventRecord);
    struct stream *stream;
    REQUIRE(IS(event, EVENT), INVALID_HANDLE);
    TRY(find_ready(&stream, handle));
    event->recorded = 1, event->capture = stream->capture;
    if (stream->capture) memcpy(event->clock, stream->clock, sizeof event->clock);
    else if (!(event->flags & 2)) clock_gettime(CLOCK_MONOTONIC, &event->time); /* 2: CU_EVENT_DISABLE_TIMING */
    return SUCCESS;
}
/* An event of a capture marks a place in a graph, not work that runs. To ask for another event is potentially unsafe. */
static int wait_event(struct event *event) {
    REQUIRE(IS(event, EVENT), INVALID_HANDLE);
    if (!event->capture) return calls_allowed();
    return event->capture->active ? invalidate(event->capture, CAPTURED_EVENT) : CAPTURED_EVENT;
}
CALL(cuEventQuery, 2000, CURRENT, struct event *event) { BEGIN(cuEventQuery); return wait_event(event); }
CALL(cuEventSynchronize, 2000, CURRENT, struct event *event) { BEGIN(cuEventSynchronize); return wait_event(event); }
CALL_AS(cuEventElapsedTime_v2, cuEventElapsedTime, 2000, CURRENT, float *ms, struct event *start, struct event *end) {
    BEGIN(cuEventElapsedTime_v2); REQUIRE(IS(start, EVENT) && IS(end, EVENT), INVALID_HANDLE);
    TRY(start->capture ? wait_event(start) : wait_event(end));
    REQUIRE(start->recorded && end->recorded && !((start->flags | end->flags) & 2), INVALID_HANDLE);
    double seconds = (double)(end->time.tv_sec - start->time.tv_sec);
    *ms = (float)(seconds * 1e3 + (double)(end->time.tv_nsec - start->time.tv_nsec) / 1e6);
    return SUCCESS;
}

/* --- captures --- */

static int join(struct capture *capture, struct stream *stream) {
    REQUIRE(capture->branches < BRANCHES, OUT_OF_MEMORY);
    stream->capture = capture, stream->branch = capture->branches++;
    memset(stream->clock, 0, sizeof stream->clock); capture->streams[stream->branch] = stream; return SUCCESS;
}
CALL(cuStreamWaitEvent, 3020, CURRENT, struct stream *handle, struct event *event, unsigned flags) {
    BEGIN(cuStreamWaitEvent);
    struct stream *stream;
    REQUIRE(IS(event, EVENT), INVALID_HANDLE);
    REQUIRE(flags <= 1, INVALID_VALUE);
    TRY(find_ready(&stream, handle));
    struct capture *capture = event->capture;
    if (!capture) /* a captured stream cannot wait for work outside the capture, but as an external event (flag 1) */
        return event->recorded && stream->capture && !flags ? invalidate(stream->capture, CAPTURE_ISOLATION) : SUCCESS;
    REQUIRE(capture->active, CAPTURED_EVENT);
    REQUIRE(!capture->invalid, CAPTURE_INVALIDATED);
    if (stream == &legacy) return invalidate(capture, CAPTURE_IMPLICIT);
    if (stream->capture && stream->capture != capture) return invalidate(stream->capture, invalidate(capture, CAPTURE_MERGE));
    if (!stream->capture) TRY(join(capture, stream)); /* the stream is captured too, from here on */
    for (int b = 0; b < BRANCHES; b++) if (event->clock[b] > stream->clock[b]) stream->clock[b] = event->clock[b];
    return SUCCESS;
}
CALL_AS(cuStreamBeginCapture_v2, cuStreamBeginCapture, 10010, CURRENT, struct stream *handle, int mode) {
    BEGIN(cuStreamBeginCapture_v2); struct stream *stream; int slot = 0;
    REQUIRE(mode >= GLOBAL && mode <= RELAXED, INVALID_VALUE); TRY(find_stream(&stream, handle));
    REQUIRE(stream != &legacy, CAPTURE_UNSUPPORTED); REQUIRE(!stream->capture, ILLEGAL_STATE);
    while (slot < CAPTURES && captures[slot]) slot++;
    REQUIRE(slot < CAPTURES, OUT_OF_MEMORY);
    if (slot == captures_end) captures_end++;
    struct capture *capture = captures[slot] = calloc(1, sizeof *capture);
    capture->active = 1, capture->mode = mode, capture->thread = pthread_self();
    capture->graph = calloc(1, sizeof *capture->graph); capture->graph->tag = GRAPH;
    return join(capture, stream);
}
CALL(cuStreamEndCapture, 10000, CURRENT, struct stream *handle, struct graph **graph) {
    BEGIN(cuStreamEndCapture);
    struct stream *stream;
    *graph = NULL;
    TRY(find_stream(&stream, handle));
    struct capture *capture = stream->capture;
    REQUIRE(capture, ILLEGAL_STATE);
    REQUIRE(capture->mode == RELAXED || pthread_equal(capture->thread, pthread_self()), CAPTURE_WRONG_THREAD);
    if (capture->streams[0] != stream && capture->streams[0]) return invalidate(capture, CAPTURE_UNMATCHED);
    int code = capture->invalid ? CAPTURE_INVALIDATED : SUCCESS;
    for (int b = 0; b < capture->branches; b++) {
        struct stream *other = capture->streams[b];
        if (!other) continue;
        if (!code && other->clock[b] > stream->clock[b]) code = CAPTURE_UNJOINED; /* no event joins its last nodes */
        other->capture = NULL;
    }
    capture->active = 0;
    for (int i = 0; i < captures_end; i++) if (captures[i] == capture) captures[i] = NULL;
    if (!code) *graph = capture->graph;
    return code;
}
CALL(cuThreadExchangeStreamCaptureMode, 10010, INIT, int *mode) {
    BEGIN(cuThreadExchangeStreamCaptureMode); REQUIRE(*mode >= GLOBAL && *mode <= RELAXED, INVALID_VALUE);
    int before = thread_mode; thread_mode = *mode, *mode = before; return SUCCESS;
}
/* Status 0: none, 1: active, 2: invalidated. This question about the legacy stream invalidates no capture. */
static int capture_status(struct stream *handle, int *status, Address *id, struct graph **graph) {
    struct stream *stream; TRY(find_stream(&stream, handle));
    if (stream == &legacy) TRY(legacy_allowed(1));
    struct capture *capture = stream->capture; *status = capture ? 1 + capture->invalid : 0;
    if (id) *id = (Address)capture;
    if (graph) *graph = capture ? capture->graph : NULL;
    return SUCCESS;
}
CALL(cuStreamIsCapturing, 10000, CURRENT, struct stream *stream, int *status)
{ BEGIN(cuStreamIsCapturing); return capture_status(stream, status, NULL, NULL); }
CALL_AS(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo, 12030, CURRENT, struct stream *stream, int *status, Address *id,
        struct graph **graph, void **nodes, void **edges, size_t *count) {
    BEGIN(cuStreamGetCaptureInfo_v3);
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return capture_status(stream, status, id, graph);
}

/* --- modules (also as libraries) and launches: a CUkernel is a CUfunction here, as cuLaunchKernel takes both --- */

static size_t image_size(const char *image) {
    size_t size;
    if (!memcmp(image, "\177ELF", 4)) { /* a cubin ends with its section headers, or with its program headers */
        unsigned long sections = *(const unsigned long *)(image + 40), programs = *(const unsigned long *)(image + 32);
        size_t section_end = sections + (size_t)*(const unsigned short *)(image + 58) * *(const unsigned short *)(image + 60);
        size_t program_end = programs + (size_t)*(const unsigned short *)(image + 54) * *(const unsigned short *)(image + 56);
        return section_end > program_end ? section_end : program_end;
    }
    if (!memcmp(image, "\x50\xed\x55\xba", 4)) return memcpy(&size, image + 8, 8), size + 16; /* a fat binary */
    return strlen(image);                                                                 /* PTX */
}
static int load(struct module **module, const char *image) {
    REQUIRE(module && image, INVALID_VALUE); size_t size = image[0] ? image_size(image) : 0;
    REQUIRE(size, INVALID_IMAGE); *module = calloc(1, sizeof **module);
    (*module)->tag = MODULE, (*module)->size = size; (*module)->image = memcpy(malloc(size), image, size);
    return SUCCESS;
}
static int find_function(struct function **function, struct module *module, const char *name) {
    REQUIRE(IS(module, MODULE), INVALID_HANDLE);
    REQUIRE(function && name && *name && strlen(name) < sizeof module->functions->name, INVALID_VALUE);
    for (struct function *f = module->functions; f; f = f->next) if (!strcmp(f->name, name)) return *function = f, SUCCESS;
    size_t length = strlen(name), i = 0; /* of an unknown name: the image does not have it */
    while (i + length <= module->size && memcmp(module->image + i, name, length)) i++;
    REQUIRE(i + length <= module->size, NOT_FOUND);
    struct function *made = calloc(1, sizeof *made);
    made->tag = FUNCTION, made->shared_max = 49152, made->next = module->functions;
    strcpy(made->name, name);
    *function = module->functions = made;
    return SUCCESS;
}
static int unload(struct module *module) {
    REQUIRE(IS(module, MODULE), INVALID_HANDLE); module->tag = 0; free(module->image);
    for (struct function *f = module->functions; f; f = f->next) f->tag = 0;
    return SUCCESS;
}
CALL(cuModuleLoadData, 2000, CURRENT | SAFE, struct module **module, const char *image)
{ BEGIN(cuModuleLoadData); return load(module, image); }
CALL(cuModuleLoadDataEx, 2010, CURRENT | SAFE, struct module **module, const char *image, unsigned n, void *options,
     void *values)
{ BEGIN(cuModuleLoadDataEx); return load(module, image); }
CALL(cuLibraryLoadData, 12000, INIT | SAFE, struct module **library, const char *image, void *jit, void *jit_values,
     unsigned jit_count, void *options, void *values, unsigned count) { BEGIN(cuLibraryLoadData); return load(library, image); }
#define FIND_CALL(name, since, needs) \
    CALL(name, since, needs, struct function **f, struct module *module, const char *symbol) \
    { BEGIN(name); return find_function(f, module, symbol); }
FIND_CALL(cuModuleGetFunction, 2000, CURRENT)
FIND_CALL(cuLibraryGetKernel, 12000, INIT)
CALL(cuModuleUnload, 2000, CURRENT | SAFE, struct module *module) { BEGIN(cuModuleUnload); return unload(module); }
CALL(cuLibraryUnload, 12000, INIT, struct module *library) { BEGIN(cuLibraryUnload); return unload(library); }
CALL(cuKernelGetFunction, 12000, CURRENT, struct function **function, struct function *kernel)
{ BEGIN(cuKernelGetFunction); REQUIRE(IS(kernel, FUNCTION), INVALID_HANDLE); *function = kernel; return SUCCESS; }
static int function_attribute(int *value, int which, struct function *function) {
    REQUIRE(IS(function, FUNCTION), INVALID_HANDLE);
    static const int values[] = {1024, 0, 0, 0, 32, 90, 90}; /* threads, shared, constant, local, registers, PTX, binary */
    *value = which >= 0 && which < 7 ? values[which] : which == 8 ? function->shared_max : 0;
    return SUCCESS;
}
static int set_function_attribute(struct function *function, int which, int value) {
    REQUIRE(IS(function, FUNCTION), INVALID_HANDLE);
    REQUIRE(which != 8 || (value >= 0 && value <= 232448), INVALID_VALUE);
    if (which == 8) function->shared_max = value; /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
    return SUCCESS;
}
CALL(cuFuncGetAttribute, 2020, CURRENT, int *value, int which, struct function *f)
{ BEGIN(cuFuncGetAttribute); return function_attribute(value, which, f); }
CALL(cuFuncSetAttribute, 9000, CURRENT, struct function *f, int which, int value)
{ BEGIN(cuFuncSetAttribute); return set_function_attribute(f, which, value); }
CALL(cuKernelGetAttribute, 12000, INIT, int *value, int which, struct function *f, int device)
{ BEGIN(cuKernelGetAttribute); return function_attribute(value, which, f); }
CALL(cuKernelSetAttribute, 12000, INIT, int which, int value, struct function *f, int device)
{ BEGIN(cuKernelSetAttribute); return set_function_attribute(f, which, value); }
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, CURRENT, int *count, struct function *f, int threads, size_t shared) {
    BEGIN(cuOccupancyMaxActiveBlocksPerMultiprocessor); REQUIRE(IS(f, FUNCTION), INVALID_HANDLE);
    REQUIRE(threads > 0 && threads <= 1024, INVALID_VALUE); *count = 8; return SUCCESS;
}

static int check_launch(const struct launch *l, void **extra) {
    REQUIRE(IS(l->function, FUNCTION), INVALID_HANDLE);
    for (int i = 0; i < 3; i++) REQUIRE(l->grid[i] && l->block[i] && l->block[i] <= (i < 2 ? 1024 : 64), INVALID_VALUE);
    REQUIRE(l->grid[0] <= 2147483647 && l->grid[1] <= 65535 && l->grid[2] <= 65535, INVALID_VALUE);
    REQUIRE((size_t)l->block[0] * l->block[1] * l->block[2] <= 1024, INVALID_VALUE);
    return l->shared <= (unsigned)l->function->shared_max && !(l->arguments && extra) ? SUCCESS : INVALID_VALUE;
}
CALL(cuLaunchKernel, 4000, CURRENT, struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
     unsigned bz, unsigned shared, struct stream *stream, void **arguments, void **extra) {
    BEGIN(cuLaunchKernel);
    struct node node = {.kind = KERNEL, .launch = {f, {gx, gy, gz}, {bx, by, bz}, shared, 0, arguments}};
    TRY(check_launch(&node.launch, extra)); return enqueue(stream, node);
}
struct config { unsigned grid[3], block[3], shared; struct stream *stream; void *attributes; unsigned count; };
CALL(cuLaunchKernelEx, 11060, CURRENT, const struct config *c, struct function *f, void **arguments, void **extra) {
    BEGIN(cuLaunchKernelEx);
    struct node node = {.kind = KERNEL, .launch = {f, {c->grid[0], c->grid[1], c->grid[2]},
                        {c->block[0], c->block[1], c->block[2]}, c->shared, 0, arguments}};
    TRY(check_launch(&node.launch, extra));
    return enqueue(c->stream, node);
}

/* --- graphs --- */

static int instantiate(struct graph **exec, struct graph *graph) {
    REQUIRE(exec && IS(graph, GRAPH), INVALID_VALUE); *exec = calloc(1, sizeof **exec); (*exec)->tag = EXEC;
    for (size_t i = 0; i < graph->count; i++) add_node(*exec, *graph->nodes[i], graph->nodes[i]);
    return SUCCESS;
}
static int destroy_graph(struct graph *graph, int tag) {
    REQUIRE(IS(graph, tag), INVALID_VALUE);
    graph->tag = 0;
    if (tag == EXEC) { /* a graph's nodes are handles, so they stay */
        for (size_t i = 0; i < graph->count; i++) free(graph->nodes[i]);
        free(graph->nodes);
    }
    return SUCCESS;
}
CALL(cuGraphInstantiateWithFlags, 11040, CURRENT, struct graph **exec, struct graph *graph, unsigned long flags)
{ BEGIN(cuGraphInstantiateWithFlags); return instantiate(exec, graph); }
ENTRY(instantiate, cuGraphInstantiate, 12000, CURRENT, cuGraphInstantiateWithFlags)
struct instantiation { unsigned long flags; struct stream *upload; struct node *failed; int result; };
CALL(cuGraphInstantiateWithParams, 12000, CURRENT, struct graph **exec, struct graph *graph, struct instantiation *parameters)
{ BEGIN(cuGraphInstantiateWithParams); parameters->failed = NULL, parameters->result = 0; return instantiate(exec, graph); }
CALL(cuGraphLaunch, 10000, CURRENT, struct graph *exec, struct stream *stream) {
    BEGIN(cuGraphLaunch);
    struct stream *ready;
    REQUIRE(IS(exec, EXEC), INVALID_VALUE);
    TRY(find_ready(&ready, stream));
    for (size_t i = 0; i < exec->count; i++) TRY(enqueue(stream, *exec->nodes[i])); /* in the order of the capture */
    return SUCCESS;
}
CALL(cuGraphDestroy, 10000, INIT, struct graph *graph) { BEGIN(cuGraphDestroy); return destroy_graph(graph, GRAPH); }
CALL(cuGraphExecDestroy, 10000, INIT, struct graph *exec) { BEGIN(cuGraphExecDestroy); return destroy_graph(exec, EXEC); }
CALL(cuGraphGetNodes, 10000, INIT, struct graph *graph, struct node **nodes, size_t *count) {
    BEGIN(cuGraphGetNodes); REQUIRE(IS(graph, GRAPH) && count, INVALID_VALUE);
    for (size_t i = 0; nodes && i < *count; i++) nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
    if (!nodes || *count > graph->count) *count = graph->count;
    return SUCCESS;
}
CALL(cuGraphNodeGetType, 10000, INIT, struct node *node, int *type) {
    BEGIN(cuGraphNodeGetType);
    REQUIRE(node, INVALID_VALUE);
    *type = (int)node->kind; /* CU_GRAPH_NODE_TYPE_KERNEL, _MEMCPY, _MEMSET: the same numbers */
    return SUCCESS;
}
struct kernel_node { struct function *function; unsigned grid[3], block[3], shared; void **arguments, **extra;
                     void *kernel, *context; };
CALL_AS(cuGraphExecKernelNodeSetParams_v2, cuGraphExecKernelNodeSetParams, 12000, CURRENT, struct graph *exec,
        struct node *node, const struct kernel_node *p) {
    BEGIN(cuGraphExecKernelNodeSetParams_v2);
    REQUIRE(IS(exec, EXEC), INVALID_VALUE);
    struct launch launch = {p->function ? p->function : p->kernel, {p->grid[0], p->grid[1], p->grid[2]},
                            {p->block[0], p->block[1], p->block[2]}, p->shared, 0, p->arguments};
    TRY(check_launch(&launch, p->extra));
    for (size_t i = 0; i < exec->count; i++)
        if (exec->nodes[i]->origin == node && node->kind == KERNEL) return exec->nodes[i]->launch = launch, SUCCESS;
    return INVALID_VALUE;
}

/* --- the hooks of tests --- */

/* Return how often a function (by the name that cuGetProcAddress knows) was called since the last reset. */
unsigned long fake_calls(const char *name)
{ unsigned long calls = 0; EACH_CALL(c) if (!strcmp((*c)->name, name)) calls += (*c)->calls; return calls; }

/* Return how many kernels ran since the last reset, also those of graphs. A captured launch runs with its graph. */
unsigned long fake_launches(void) { return launch_count; }

/* Describe a launch: 0 is the last one, 1 the one before. Return 1, or 0 if it is not known (any more). */
int fake_launch(int i, char *name, int room, unsigned grid[3], unsigned block[3], unsigned long *stream) {
    if (i < 0 || i >= LAUNCHES || (unsigned long)i >= launch_count) return 0;
    const struct launch *launch = &launches[(launch_count - 1 - (unsigned long)i) % LAUNCHES];
    snprintf(name, (size_t)room, "%s", launch->function->name); memcpy(grid, launch->grid, sizeof launch->grid);
    memcpy(block, launch->block, sizeof launch->block); *stream = launch->stream; return 1;
}

/* Return the kernelParams of a launch: pointers to the arguments, which the caller may have changed since. */
void **fake_arguments(int i) {
    if (i < 0 || i >= LAUNCHES || (unsigned long)i >= launch_count) return NULL;
    return launches[(launch_count - 1 - (unsigned long)i) % LAUNCHES].arguments;
}

/* Let the next `times` calls of a function return `code` and do nothing else. Return 0, or 1: there is no such function. */
int fake_fail(const char *name, int code, int times) {
    int unknown = 1;
    EACH_CALL(c) if (!strcmp((*c)->name, name)) (*c)->fail_code = code, (*c)->fail_times = times, unknown = 0;
    return unknown;
}

/* Forget calls, launches and failures to come. Memory, streams, captures and modules stay. */
void fake_reset(void) { EACH_CALL(c) (*c)->calls = 0, (*c)->fail_times = 0; launch_count = 0; }
