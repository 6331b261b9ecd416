/* One link of the network lab: what a host sends into one TUN device comes out of another, at a rate and later.

       link SEED NETNS DEVICE NETNS DEVICE

   makes the devices, one in each network namespace, says "ready", and then obeys its stdin. A line

       RATE DELAY JITTER LOSS QUEUE  RATE DELAY JITTER LOSS QUEUE

   sets both ways, first to second and back: bit/s, ns, ns, packets lost of a thousand million, bytes. An empty line changes
   nothing. Either is answered with what each way has done so far: packets and bytes delivered, packets dropped by the queue,
   packets lost. It ends with its stdin, so never outlives who started it; the devices go with it.

   Rules
   - A way is a queue, then a line. A packet waits in the queue for those before it, takes 8 * size / rate to be sent, and
     is on the line for the delay. Size is the IP packet's: what carries it on a real wire comes on top.
   - The queue drops at its tail, like a router's. What is being sent counts as waiting.
   - Jitter moves each delay by a uniform draw from [-jitter, jitter], but no packet overtakes another: it arrives with the
     one before it at the earliest. Nor does one when the delay is made shorter.
   - A lost packet has been sent: it took its time. The draws depend on the seed and on the number of packets sent before.
   - Rate 0 is a cut cable: what was queued or on the line is lost, and so is what comes.
   - The rate holds on average whenever we run: a packet's times follow from those of the packet before it. Only delivery is
     late, by what this machine needs to wake us. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull
#define LOSS_OF 1000000000ull
#define WAKE_NS 50000ull          /* no two wakes closer than this: at 1 Gbit/s a packet would need one each 12 us */
#define READ_AT_ONCE 64           /* packets of one device before the other has its turn */
#define PACKET_BYTES_MAX 65536    /* of IP */
#define HELD_BYTES_MAX (256ull << 20) /* memory of one way: 1 Gbit/s for 2 s */
#define LINE_BYTES_MAX 256

struct packet {
    struct packet *next;
    uint64_t due_ns; /* when it leaves the line */
    size_t size;
    unsigned char bytes[];
};

struct fifo {
    struct packet *first, *last;
};

struct settings {
    uint64_t rate, delay_ns, jitter_ns, loss, queue_bytes; /* in the order in which stdin has them */
};

struct way {
    int from, to;
    struct settings set;
    struct fifo queue, line;
    uint64_t queue_bytes, held_bytes; /* of IP in the queue; of memory in queue and line */
    uint64_t start_ns;                /* when the first in the queue began to be sent */
    uint64_t last_due_ns;             /* of the packet that went onto the line last */
    uint64_t random;
    uint64_t packets, bytes, dropped, lost;
};

static const struct settings SETTINGS_MAX = {10 * SECOND_NS, 10 * SECOND_NS, 10 * SECOND_NS, LOSS_OF, HELD_BYTES_MAX};

static _Noreturn void fail(const char *format, ...)
{
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    va_end(words);
    fputc('\n', stderr);
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

static uint64_t max_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* splitmix64 (Steele et al. 2014): any seed will do, 0 too. */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void put(struct fifo *fifo, struct packet *packet)
{
    packet->next = NULL;
    *(fifo->first ? &fifo->last->next : &fifo->first) = packet;
    fifo->last = packet;
}

static struct packet *take(struct fifo *fifo)
{
    struct packet *packet = fifo->first;
    fifo->first = packet->next;
    return packet;
}

static void forget(struct way *way, struct packet *packet)
{
    way->held_bytes -= sizeof *packet + packet->size;
    free(packet);
}

/* When the last bit of the first in the queue is sent. */
static uint64_t sent_ns(const struct way *way)
{
    return way->start_ns + way->queue.first->size * 8 * SECOND_NS / way->set.rate;
}

/* A packet comes from the device. */
static void accept_packet(struct way *way, const unsigned char *bytes, size_t size, uint64_t now)
{
    const bool cut = way->set.rate == 0;
    struct packet *packet = NULL;
    if (!cut && way->queue_bytes + size <= way->set.queue_bytes && way->held_bytes < HELD_BYTES_MAX)
        packet = malloc(sizeof *packet + size);
    if (!packet) {
        ++*(cut ? &way->lost : &way->dropped);
        return;
    }
    packet->size = size;
    memcpy(packet->bytes, bytes, size);
    if (!way->queue.first)
        way->start_ns = max_of(way->start_ns, now);
    put(&way->queue, packet);
    way->queue_bytes += size;
    way->held_bytes += sizeof *packet + size;
}

/* From the queue onto the line: all whose last bit is sent by now. */
static void send_packets(struct way *way, uint64_t now)
{
    while (way->queue.first && sent_ns(way) <= now) {
        way->start_ns = sent_ns(way);
        struct packet *packet = take(&way->queue);
        way->queue_bytes -= packet->size;
        const uint64_t jitter = draw(&way->random) % (2 * way->set.jitter_ns + 1);
        if (draw(&way->random) % LOSS_OF < way->set.loss) {
            ++way->lost;
            forget(way, packet);
            continue;
        }
        const uint64_t due = way->start_ns + way->set.delay_ns + jitter - way->set.jitter_ns;
        packet->due_ns = way->last_due_ns = max_of(way->last_due_ns, due);
        put(&way->line, packet);
    }
}

/* From the line into the device: all that are due. */
static void deliver_packets(struct way *way, uint64_t now)
{
    while (way->line.first && way->line.first->due_ns <= now) {
        struct packet *packet = take(&way->line);
        if (write(way->to, packet->bytes, packet->size) == (ssize_t)packet->size) {
            ++way->packets;
            way->bytes += packet->size;
        } else {
            ++way->dropped; /* the device is down, or the kernel is out of memory */
        }
        forget(way, packet);
    }
}

/* When there is next something to do; UINT64_MAX: only once a packet comes. Of a queue, nothing is due before its first has
   crossed the line, so that sending needs no wake of its own. */
static uint64_t next_ns(const struct way *way)
{
    if (way->line.first)
        return way->line.first->due_ns;
    return way->queue.first ? sent_ns(way) + way->set.delay_ns - way->set.jitter_ns : UINT64_MAX;
}

static void read_packets(struct way *way, uint64_t now)
{
    static unsigned char bytes[PACKET_BYTES_MAX];
    for (int i = 0; i < READ_AT_ONCE; ++i) {
        const ssize_t size = read(way->from, bytes, sizeof bytes);
        if (size <= 0) {
            if (size < 0 && errno != EAGAIN && errno != EINTR)
                fail("cannot read a device: %s", strerror(errno));
            return;
        }
        accept_packet(way, bytes, (size_t)size, now);
    }
}

static void lose(struct way *way, struct fifo *fifo)
{
    for (; fifo->first; ++way->lost)
        forget(way, take(fifo));
}

static void change(struct way *way, const struct settings *set, uint64_t now)
{
    const uint64_t before = way->set.rate;
    way->set = *set;
    if (set->rate == 0) {
        lose(way, &way->queue);
        lose(way, &way->line);
        way->queue_bytes = way->last_due_ns = 0;
    } else if (way->queue.first) { /* what of the first was sent at the old rate stays sent */
        way->start_ns = now - (uint64_t)((double)(now - way->start_ns) * (double)before / (double)set->rate);
    }
}

/* False: not what this program understands. */
static bool parse(const char *line, struct settings set[2])
{
    const uint64_t *most = (const uint64_t *)&SETTINGS_MAX;
    for (int way = 0; way < 2; ++way) {
        uint64_t *field = (uint64_t *)&set[way];
        for (size_t i = 0; i < sizeof *set / sizeof *field; ++i) {
            char *end;
            field[i] = strtoull(line, &end, 10);
            if (end == line || field[i] > most[i])
                return false;
            line = end;
        }
        if (set[way].jitter_ns > set[way].delay_ns)
            return false;
    }
    return *line == '\0';
}

/* Obeys one line of stdin. */
static void obey(const char *line, struct way ways[2], uint64_t now)
{
    struct settings set[2];
    if (*line && !parse(line, set))
        fail("not two times RATE DELAY JITTER LOSS QUEUE, each within its bounds: %s", line);
    for (int i = 0; *line && i < 2; ++i)
        change(&ways[i], &set[i], now);
    for (int i = 0; i < 2; ++i)
        printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "%c", ways[i].packets, ways[i].bytes, ways[i].dropped,
               ways[i].lost, " \n"[i]);
    fflush(stdout);
}

/* Reads stdin and obeys each whole line. False: it has ended. */
static bool read_lines(struct way ways[2], uint64_t now)
{
    static char text[LINE_BYTES_MAX];
    static size_t used;
    const ssize_t size = read(STDIN_FILENO, text + used, sizeof text - 1 - used);
    if (size <= 0)
        return false;
    used += (size_t)size;
    text[used] = '\0';
    char *line = text;
    for (char *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = '\0';
        obey(line, ways, now);
    }
    used -= (size_t)(line - text);
    if (used == sizeof text - 1)
        fail("a line is longer than %zu bytes", sizeof text - 2);
    memmove(text, line, used);
    return true;
}

/* A new TUN device in a namespace of `ip netns`. No offloads: each packet is one that fits the MTU, so that it is counted by
   the kernel and lost here with headers of its own. The kernel cuts what TCP hands down in one piece just before. */
static int make_device(const char *netns, const char *name)
{
    char path[256];
    if (snprintf(path, sizeof path, "/run/netns/%s", netns) >= (int)sizeof path || strlen(name) >= IFNAMSIZ)
        fail("a name is too long: %s %s", netns, name);
    const int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0)
        fail("%s: %s", path, strerror(errno));
    close(space);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = (short)(IFF_TUN | IFF_NO_PI | IFF_TUN_EXCL)};
    strcpy(request.ifr_name, name);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0)
        fail("/dev/net/tun: %s", strerror(errno));
    return device;
}

int main(int count, char **words)
{
    if (count != 6)
        fail("usage: link SEED NETNS DEVICE NETNS DEVICE");
    const uint64_t seed = strtoull(words[1], NULL, 10);
    const int devices[2] = {make_device(words[2], words[3]), make_device(words[4], words[5])};
    struct way ways[2] = {
        {.from = devices[0], .to = devices[1], .random = 2 * seed},
        {.from = devices[1], .to = devices[0], .random = 2 * seed + 1},
    };
    signal(SIGINT, SIG_IGN);           /* Ctrl-C is for who started us, and ends us by closing our stdin */
    prctl(PR_SET_TIMERSLACK, 1ul);     /* ns: wake when told to */
    /* A cable does not wait for a busy CPU. Where this is refused, it does; the kernel keeps 5 % for all others. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    puts("ready");
    fflush(stdout);

    for (;;) {
        uint64_t now = now_ns();
        const uint64_t next = next_ns(&ways[0]) < next_ns(&ways[1]) ? next_ns(&ways[0]) : next_ns(&ways[1]);
        const uint64_t sleep = max_of(next, now + WAKE_NS) - now;
        const struct timespec timeout = {(time_t)(sleep / SECOND_NS), (long)(sleep % SECOND_NS)};
        struct pollfd polled[3] = {{devices[0], POLLIN, 0}, {devices[1], POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        if (ppoll(polled, 3, next == UINT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR)
            fail("ppoll: %s", strerror(errno));
        now = now_ns();
        for (int i = 0; i < 2; ++i) {
            send_packets(&ways[i], now); /* first, so that the queue is as full as it is now */
            if (polled[i].revents)
                read_packets(&ways[i], now);
            deliver_packets(&ways[i], now);
        }
        if (polled[2].revents && !read_lines(ways, now))
            return 0;
    }
}
