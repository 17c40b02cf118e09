/* Records the file events of a process below one directory, or kills the process at the n-th event.
 *
 * The library is loaded with LD_PRELOAD, and idle until `faults_arm` is called. An event is an opening for writing, a
 * write, a change of length, a rename, a link, a removal, a new directory or an fsync. A line of the log is: number,
 * operation, path, and the new path of a rename, with tabs between them. A write, rename or removal is logged before it
 * happens; an opening, a new directory and an fsync are logged after they have succeeded. So everything that is durable
 * by the log at a rename was durable.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static char place[PATH_MAX];
static size_t place_length;
static long deadly; /* the event that kills; 0: none, -1: the first whose path has `deadly_part` in it */
static char deadly_part[PATH_MAX];
static int log_fd = -1;
static atomic_long count;
static atomic_int armed;

/* Counts the events below `directory` from now on. */
void faults_arm(const char *directory, long number, const char *part, const char *log) {
    if (!realpath(directory, place)) snprintf(place, sizeof place, "%s", directory);
    place_length = strlen(place);
    deadly = *part ? -1 : number;
    snprintf(deadly_part, sizeof deadly_part, "%s", part);
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    atomic_store(&count, 0);
    atomic_store(&armed, 1);
}

/* Returns the path of a descriptor's file; 0 if the file is not below the directory. */
static int find_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, place, place_length) && (path[place_length] == '/' || !path[place_length]);
}

static int find(int directory, const char *name, char *path) {
    char base[PATH_MAX];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    }
    return !strncmp(path, place, place_length) && (path[place_length] == '/' || !path[place_length]);
}

/* Whether the process dies at this event. */
static int note(const char *operation, const char *path, const char *to) {
    char line[2 * PATH_MAX + 64];
    long number = atomic_fetch_add(&count, 1) + 1;
    int last = deadly < 0 ? !!strstr(path, deadly_part) : deadly && number == deadly;
    if (log_fd >= 0 && (last || !deadly)) {
        int length = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\n", number, operation, path, to);
        if (syscall(SYS_write, log_fd, line, (size_t)length) != length) abort();
    }
    return last;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void at(const char *operation, int directory, const char *name) {
    char path[PATH_MAX];
    if (atomic_load(&armed) && name && find(directory, name, path) && note(operation, path, "")) die();
}

static void at_fd(const char *operation, int fd) {
    char path[PATH_MAX];
    if (atomic_load(&armed) && find_fd(fd, path) && note(operation, path, "")) die();
}

static void at_rename(int from, const char *old, int to, const char *new) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!atomic_load(&armed)) return;
    int inside = find(from, old, a);
    inside |= find(to, new, b);
    if (inside && note("rename", a, b)) die();
}

/* Whether the process dies in this write; half of it is then written. */
static int at_write(int fd) {
    char path[PATH_MAX];
    return atomic_load(&armed) && find_fd(fd, path) && note("write", path, "");
}

/* For calls that may fail: called before the call, and with the path after it. */
static int before(const char *operation, int directory, const char *name, char *path) {
    if (!atomic_load(&armed) || !name || !find(directory, name, path)) return 0;
    if (deadly && note(operation, path, "")) die();
    return !deadly;
}

static int before_fd(const char *operation, int fd, char *path) {
    if (!atomic_load(&armed) || !find_fd(fd, path)) return 0;
    if (deadly && note(operation, path, "")) die();
    return !deadly;
}

#define DO(operation, directory, name, call) \
    char whole[PATH_MAX]; \
    int seen = before(operation, directory, name, whole); \
    int result = call; \
    if (seen && result >= 0) note(operation, whole, ""); \
    return result

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) {
    MODE(flags, flags) REAL(open);
    if (!writes(flags)) return real(path, flags, mode);
    DO("open", AT_FDCWD, path, real(path, flags, mode));
}

int open64(const char *path, int flags, ...) {
    MODE(flags, flags) REAL(open64);
    if (!writes(flags)) return real(path, flags, mode);
    DO("open", AT_FDCWD, path, real(path, flags, mode));
}

int openat(int directory, const char *path, int flags, ...) {
    MODE(flags, flags) REAL(openat);
    if (!writes(flags)) return real(directory, path, flags, mode);
    DO("open", directory, path, real(directory, path, flags, mode));
}

int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags, flags) REAL(openat64);
    if (!writes(flags)) return real(directory, path, flags, mode);
    DO("open", directory, path, real(directory, path, flags, mode));
}

int creat(const char *path, mode_t mode) {
    REAL(creat);
    DO("open", AT_FDCWD, path, real(path, mode));
}

int creat64(const char *path, mode_t mode) {
    REAL(creat64);
    DO("open", AT_FDCWD, path, real(path, mode));
}

FILE *fopen(const char *path, const char *how) {
    REAL(fopen);
    if (how[0] != 'r' || strchr(how, '+')) at("open", AT_FDCWD, path);
    return real(path, how);
}

FILE *fopen64(const char *path, const char *how) {
    REAL(fopen64);
    if (how[0] != 'r' || strchr(how, '+')) at("open", AT_FDCWD, path);
    return real(path, how);
}

ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(write);
    if (at_write(fd)) { (void)!real(fd, bytes, size / 2); die(); }
    return real(fd, bytes, size);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t where) {
    REAL(pwrite);
    if (at_write(fd)) { (void)!real(fd, bytes, size / 2, where); die(); }
    return real(fd, bytes, size, where);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t where) {
    REAL(pwrite64);
    if (at_write(fd)) { (void)!real(fd, bytes, size / 2, where); die(); }
    return real(fd, bytes, size, where);
}

/* A process that dies here writes only the first of several pieces. */
ssize_t writev(int fd, const struct iovec *pieces, int pieces_count) {
    REAL(writev);
    if (at_write(fd)) { (void)!real(fd, pieces, pieces_count > 1); die(); }
    return real(fd, pieces, pieces_count);
}

ssize_t pwritev(int fd, const struct iovec *pieces, int pieces_count, off_t where) {
    REAL(pwritev);
    if (at_write(fd)) { (void)!real(fd, pieces, pieces_count > 1, where); die(); }
    return real(fd, pieces, pieces_count, where);
}

ssize_t pwritev64(int fd, const struct iovec *pieces, int pieces_count, off64_t where) {
    REAL(pwritev64);
    if (at_write(fd)) { (void)!real(fd, pieces, pieces_count > 1, where); die(); }
    return real(fd, pieces, pieces_count, where);
}

ssize_t sendfile(int out, int in, off_t *where, size_t size) {
    REAL(sendfile);
    if (at_write(out)) die();
    return real(out, in, where, size);
}

ssize_t sendfile64(int out, int in, off64_t *where, size_t size) {
    REAL(sendfile64);
    if (at_write(out)) die();
    return real(out, in, where, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    if (at_write(out)) die();
    return real(in, from, out, to, size, flags);
}

int ftruncate(int fd, off_t size) { REAL(ftruncate); at_fd("truncate", fd); return real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); at_fd("truncate", fd); return real(fd, size); }

int fsync(int fd) {
    REAL(fsync);
    char path[PATH_MAX];
    int seen = before_fd("fsync", fd, path), result = real(fd);
    if (seen && !result) note("fsync", path, "");
    return result;
}

int fdatasync(int fd) {
    REAL(fdatasync);
    char path[PATH_MAX];
    int seen = before_fd("fsync", fd, path), result = real(fd);
    if (seen && !result) note("fsync", path, "");
    return result;
}

int rename(const char *old, const char *new) {
    REAL(rename);
    at_rename(AT_FDCWD, old, AT_FDCWD, new);
    return real(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    at_rename(from, old, to, new);
    return real(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    REAL(renameat2);
    at_rename(from, old, to, new);
    return real(from, old, to, new, flags);
}

int link(const char *old, const char *new) { REAL(link); at("link", AT_FDCWD, new); return real(old, new); }
int symlink(const char *to, const char *path) { REAL(symlink); at("link", AT_FDCWD, path); return real(to, path); }

int unlink(const char *path) { REAL(unlink); at("unlink", AT_FDCWD, path); return real(path); }
int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path);
    return real(directory, path, flags);
}
int remove(const char *path) { REAL(remove); at("unlink", AT_FDCWD, path); return real(path); }
int rmdir(const char *path) { REAL(rmdir); at("rmdir", AT_FDCWD, path); return real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); DO("mkdir", AT_FDCWD, path, real(path, mode)); }
int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(mkdirat);
    DO("mkdir", directory, path, real(directory, path, mode));
}
