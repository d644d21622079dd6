/* Counts what torch allocates on CPUs, in all threads: the bytes that are held now, and the most that ever were.

   torch has no such counter of its own; all its tensors come from c10::alloc_cpu, which this replaces, and workspaces of
   libraries do not. Loaded by LD_PRELOAD, asked by ctypes. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20) /* a power of two, many times the number of tensors alive */
#define GONE ((void *)1)

static void *held[SLOTS];
static size_t sizes[SLOTS];
static size_t now, most;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t first_slot(void *address) { return (uint32_t)(((uintptr_t)address >> 6) * 2654435761u) & (SLOTS - 1); }

/* c10::alloc_cpu(unsigned long) */
void *_ZN3c109alloc_cpuEm(size_t size) {
    void *address = NULL;
    if (!size || posix_memalign(&address, 64, size)) return NULL;
    pthread_mutex_lock(&lock);
    uint32_t slot = first_slot(address);
    while (held[slot] && held[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
    held[slot] = address;
    sizes[slot] = size;
    now += size;
    if (now > most) most = now;
    pthread_mutex_unlock(&lock);
    return address;
}

/* c10::free_cpu(void*) */
void _ZN3c108free_cpuEPv(void *address) {
    pthread_mutex_lock(&lock);
    for (uint32_t slot = first_slot(address); held[slot]; slot = (slot + 1) & (SLOTS - 1))
        if (held[slot] == address) {
            held[slot] = GONE;
            now -= sizes[slot];
            break;
        }
    pthread_mutex_unlock(&lock);
    free(address);
}

size_t peak_bytes(void) { return most; }
void forget_peak(void) { most = now; }
