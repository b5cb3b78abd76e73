/* A shim for LD_PRELOAD: calls that touch files below one directory are counted, made to fail, and recorded.
 *
 * Nothing happens until `calls_arm` or `calls_record` is called, by ctypes; `calls.py` has the numbers of kinds and the
 * form of a record.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN_READ, OPEN_WRITE, READ, WRITE, FSYNC, RENAME, LINK, UNLINK, MKDIR, KINDS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char prefix[PATH_MAX];
static long counts[KINDS], nth, budget = -1;
static int armed = -1, fails_with, again, log_fd = -1;

void calls_arm(const char *directory, int kind, long number, int error, int repeat, long bytes) {
    pthread_mutex_lock(&lock);
    snprintf(prefix, sizeof prefix, "%s", directory);
    memset(counts, 0, sizeof counts);
    armed = kind, nth = number, fails_with = error, again = repeat, budget = bytes;
    pthread_mutex_unlock(&lock);
}

void calls_record(const char *directory, int fd) {
    pthread_mutex_lock(&lock);
    snprintf(prefix, sizeof prefix, "%s", directory);
    log_fd = fd;
    pthread_mutex_unlock(&lock);
}

long calls_count(int kind) { return counts[kind]; }

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* Whether a path is the directory, whose name in `prefix` ends with a slash, or below it. */
static int inside(const char *path) {
    size_t size = strlen(prefix);
    return size && path && (!strncmp(path, prefix, size) || (strlen(path) == size - 1 && !strncmp(path, prefix, size - 1)));
}

static int fd_inside(int fd) {
    char link[64], path[PATH_MAX];
    if (!prefix[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return inside(path);
}

/* Whether this call is to fail; the lock is held. */
static int fails(int kind) {
    long number = counts[kind]++;
    if (kind != armed || number < nth || (number > nth && !again)) return 0;
    errno = fails_with;
    return 1;
}

struct record { uint64_t inode; int64_t offset, size; uint32_t one, two; char operation; } __attribute__((packed));

static void put(const void *data, size_t size) {
    const char *from = data;
    while (size) {
        ssize_t done = REAL(write)(log_fd, from, size);
        if (done < 0) return;
        from += done, size -= done;
    }
}

static void record(char operation, uint64_t inode, int64_t offset, const void *data, int64_t size, const char *one,
                   const char *two) {
    if (log_fd < 0) return;
    int error = errno;
    struct record head = {inode, offset, size, one ? strlen(one) : 0, two ? strlen(two) : 0, operation};
    put(&head, sizeof head);
    put(one, head.one), put(two, head.two);
    if (data) put(data, size);
    errno = error;
}

static uint64_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? 0 : status.st_ino;
}

static int opened(int where, const char *path, int flags, mode_t mode) {
    if (where != AT_FDCWD || !inside(path)) return REAL(openat)(where, path, flags, mode);
    int writes = (flags & O_ACCMODE) != O_RDONLY, fd = -1;
    pthread_mutex_lock(&lock);
    if (!fails(writes ? OPEN_WRITE : OPEN_READ)) {
        int there = !access(path, F_OK);
        fd = REAL(openat)(where, path, flags, mode);
        if (fd >= 0 && !there) record('C', inode_of(fd), 0, 0, 0, path, 0);
        else if (fd >= 0 && flags & O_TRUNC) record('T', inode_of(fd), 0, 0, 0, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return opened(AT_FDCWD, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
    int name(int where, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return opened(where, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

static ssize_t written(int fd, const void *data, size_t size, off_t at, int positioned) {
    ssize_t done = -1;
    pthread_mutex_lock(&lock);
    if (!fails(WRITE)) {
        if (budget >= 0 && (long)size > budget) size = budget; /* a full disk takes what it can first */
        if (budget == 0 && size == 0) errno = fails_with;
        else {
            off_t start = positioned ? at : lseek(fd, 0, SEEK_CUR);
            done = positioned ? REAL(pwrite64)(fd, data, size, at) : REAL(write)(fd, data, size);
            if (done > 0) record('W', inode_of(fd), start, data, done, 0, 0);
            if (done > 0 && budget >= 0) budget -= done;
        }
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    return fd_inside(fd) ? written(fd, data, size, 0, 0) : REAL(write)(fd, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fd_inside(fd) ? written(fd, data, size, at, 1) : REAL(pwrite64)(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!fd_inside(fd)) return REAL(writev)(fd, parts, count);
    return count ? written(fd, parts[0].iov_base, parts[0].iov_len, 0, 0) : 0;
}

/* A call that may fail, and is recorded if it worked. */
#define CALL(kind, call, operation, inode, one, two) \
    pthread_mutex_lock(&lock); \
    __typeof__(call) result = -1; \
    if (!fails(kind)) { \
        result = call; \
        if (result >= 0 && operation) record(operation, inode, 0, 0, 0, one, two); \
    } \
    pthread_mutex_unlock(&lock); \
    return result;

ssize_t read(int fd, void *data, size_t size) {
    if (!fd_inside(fd)) return REAL(read)(fd, data, size);
    CALL(READ, REAL(read)(fd, data, size), 0, 0, 0, 0)
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    if (!fd_inside(fd)) return REAL(pread64)(fd, data, size, at);
    CALL(READ, REAL(pread64)(fd, data, size, at), 0, 0, 0, 0)
}
ssize_t pread(int fd, void *data, size_t size, off_t at) { return pread64(fd, data, size, at); }
int fsync(int fd) {
    if (!fd_inside(fd)) return REAL(fsync)(fd);
    CALL(FSYNC, REAL(fsync)(fd), 'F', inode_of(fd), 0, 0)
}
int fdatasync(int fd) {
    if (!fd_inside(fd)) return REAL(fdatasync)(fd);
    CALL(FSYNC, REAL(fdatasync)(fd), 'F', inode_of(fd), 0, 0)
}
int ftruncate64(int fd, off64_t size) {
    if (!fd_inside(fd)) return REAL(ftruncate64)(fd, size);
    CALL(WRITE, REAL(ftruncate64)(fd, size), 'T', inode_of(fd), 0, 0)
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int rename(const char *one, const char *two) {
    if (!inside(two)) return REAL(rename)(one, two);
    CALL(RENAME, REAL(rename)(one, two), 'R', 0, one, two)
}
int renameat2(int a, const char *one, int b, const char *two, unsigned flags) {
    if (!inside(two)) return REAL(renameat2)(a, one, b, two, flags);
    CALL(RENAME, REAL(renameat2)(a, one, b, two, flags), flags & RENAME_EXCHANGE ? 'X' : 'R', 0, one, two)
}
int link(const char *one, const char *two) {
    if (!inside(two)) return REAL(link)(one, two);
    CALL(LINK, REAL(link)(one, two), 'L', 0, one, two)
}
int linkat(int a, const char *one, int b, const char *two, int flags) {
    if (!inside(two)) return REAL(linkat)(a, one, b, two, flags);
    CALL(LINK, REAL(linkat)(a, one, b, two, flags), 'L', 0, one, two)
}
int unlink(const char *one) {
    if (!inside(one)) return REAL(unlink)(one);
    CALL(UNLINK, REAL(unlink)(one), 'U', 0, one, 0)
}
int rmdir(const char *one) {
    if (!inside(one)) return REAL(rmdir)(one);
    CALL(UNLINK, REAL(rmdir)(one), 'D', 0, one, 0)
}
int mkdir(const char *one, mode_t mode) {
    if (!inside(one)) return REAL(mkdir)(one, mode);
    struct stat status;
    CALL(MKDIR, REAL(mkdir)(one, mode), 'M', stat(one, &status) ? 0 : status.st_ino, one, 0)
}
