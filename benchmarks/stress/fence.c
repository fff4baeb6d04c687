// Preloaded: aligned memory, which holds torch's tensors, ends right before a page that cannot be touched, or begins
// right after one (FENCE=begin). Freed memory is never used again, and cannot be touched either.

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void __libc_free(void *);

enum { PAGE = 4096, LEAST_ALIGNMENT = 8 };
static const size_t RESERVED = (size_t)1 << 40;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *base, *next;
static int at_begin;

static void reserve(void) {
  base = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
  next = base;
  const char *where = getenv("FENCE");
  at_begin = where && !strcmp(where, "begin");
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  (void)alignment;  // half of what torch asks for would leave room behind the data
  size_t pages = (size + PAGE - 1) / PAGE + (size == 0);
  pthread_mutex_lock(&lock);
  if (!base) reserve();
  char *block = next + PAGE;  // [untouchable | pages | the next block's untouchable page]
  next = block + pages * PAGE;
  pthread_mutex_unlock(&lock);
  if (next + PAGE > base + RESERVED || mprotect(block, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
  memset(block, 0xff, pages * PAGE);  // NaN, so that what is not written shows
  uintptr_t end = (uintptr_t)(block + pages * PAGE - size) & ~(uintptr_t)(LEAST_ALIGNMENT - 1);
  *result = at_begin ? (void *)block : (void *)end;
  return 0;
}

void free(void *pointer) {
  char *p = pointer;
  if (!base || p < base || p >= base + RESERVED) {
    __libc_free(pointer);
    return;
  }
  // Its length is that of the pages that can still be touched: the first byte of each says so.
  char *block = base + ((p - base) / PAGE) * PAGE;
  unsigned char resident;
  size_t pages = 0;
  pthread_mutex_lock(&lock);
  while (block + pages * PAGE < next && mincore(block + pages * PAGE, PAGE, &resident) == 0 && (resident & 1)) pages++;
  pthread_mutex_unlock(&lock);
  if (!pages) abort();  // freed twice
  madvise(block, pages * PAGE, MADV_DONTNEED);
  mprotect(block, pages * PAGE, PROT_NONE);
}
