/* Preloaded, has a host see late what others have written, as a client does that goes by what it knew before:
 * a process finds a regular file of another group than its own to be absent, or empty, until so many seconds
 * after it first looked. Rules stand in LATE_FILES, one a line: the folder, how names end or *, the seconds,
 * whether files are empty meanwhile. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum sight { SEEN, ABSENT, EMPTY };

#define HONEST(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* How long ago this process first looked at a file. */
static double looked_s(const char *path) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    static struct look { char *path; double at_s; struct look *next; } *looks;
    pthread_mutex_lock(&one_at_a_time);
    struct look *look = looks;
    while (look && strcmp(look->path, path)) look = look->next;
    if (!look) {
        look = malloc(sizeof *look);
        *look = (struct look){strdup(path), now_s(), looks};
        looks = look;
    }
    pthread_mutex_unlock(&one_at_a_time);
    return now_s() - look->at_s;
}

static enum sight sight_of(const char *path) {
    char folder[PATH_MAX], end[64];
    double late_s;
    int empty;
    struct stat stat;
    const char *rule = getenv("LATE_FILES");
    for (; rule && *rule; rule = strchr(rule, '\n') ? strchr(rule, '\n') + 1 : NULL) {
        if (sscanf(rule, "%4095s %63s %lf %d", folder, end, &late_s, &empty) != 4) continue;
        size_t length = strlen(path), of_end = strcmp(end, "*") ? strlen(end) : 0;
        if (strncmp(path, folder, strlen(folder)) || length < of_end) continue;
        if (of_end && strcmp(path + length - of_end, end)) continue;
        if (HONEST(fstatat)(AT_FDCWD, path, &stat, 0) || !S_ISREG(stat.st_mode) || stat.st_gid == getegid())
            return SEEN;
        return looked_s(path) >= late_s ? SEEN : empty ? EMPTY : ABSENT;
    }
    return SEEN;
}

static int absent(void) {
    errno = ENOENT;
    return -1;
}

#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = va_arg(more, mode_t);                                            \
        va_end(more);                                                                  \
        enum sight sight = sight_of(path);                                             \
        if (sight == ABSENT) return absent();                                          \
        return sight == EMPTY ? memfd_create("", 0) : HONEST(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        enum sight sight = sight_of(path);                                \
        const char *other = sight == EMPTY ? "/dev/null" : "/not/there";  \
        return HONEST(name)(sight == SEEN ? path : other, mode);          \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define STAT(name, type)                                   \
    int name(const char *path, struct type *found) {       \
        enum sight sight = sight_of(path);                 \
        if (sight == ABSENT) return absent();              \
        int status = HONEST(name)(path, found);            \
        if (!status && sight == EMPTY) found->st_size = 0; \
        return status;                                     \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define READDIR(name, type)                                                    \
    struct type *name(DIR *folder) {                                           \
        char path[PATH_MAX], link[64];                                         \
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd(folder));        \
        ssize_t length = readlink(link, path, sizeof path - 1);                \
        for (struct type *one; (one = HONEST(name)(folder));) {                \
            if (length < 0) return one;                                        \
            snprintf(path + length, sizeof path - length, "/%s", one->d_name); \
            if (sight_of(path) != ABSENT) return one;                          \
        }                                                                      \
        return NULL;                                                           \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
