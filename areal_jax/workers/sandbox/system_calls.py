"""The system calls that confined code has, by name, with their numbers on x86-64 and on aarch64; None = no such call.

They are what CPython 3.11 to 3.13, its standard library, numpy with threads and asyncio make. A call that is not here
is refused, also one that a later kernel brings.
"""

from __future__ import annotations

from collections.abc import Mapping

ALLOWED: Mapping[str, tuple[int | None, int | None]] = {
    # files and folders
    'read': (0, 63), 'write': (1, 64), 'open': (2, None), 'close': (3, 57), 'stat': (4, None), 'fstat': (5, 80),
    'lstat': (6, None), 'newfstatat': (262, 79), 'statx': (332, 291), 'lseek': (8, 62), 'pread64': (17, 67),
    'pwrite64': (18, 68), 'readv': (19, 65), 'writev': (20, 66), 'preadv': (295, 69), 'pwritev': (296, 70),
    'preadv2': (327, 286), 'pwritev2': (328, 287), 'access': (21, None), 'faccessat': (269, 48),
    'faccessat2': (439, 439), 'openat': (257, 56), 'creat': (85, None), 'fcntl': (72, 25), 'flock': (73, 32),
    'fsync': (74, 82), 'fdatasync': (75, 83), 'truncate': (76, 45), 'ftruncate': (77, 46), 'fallocate': (285, 47),
    'fadvise64': (221, 223), 'getdents': (78, None), 'getdents64': (217, 61), 'getcwd': (79, 17), 'chdir': (80, 49),
    'fchdir': (81, 50), 'rename': (82, None), 'renameat': (264, 38), 'renameat2': (316, 276), 'mkdir': (83, None),
    'mkdirat': (258, 34), 'rmdir': (84, None), 'link': (86, None), 'linkat': (265, 37), 'unlink': (87, None),
    'unlinkat': (263, 35), 'symlink': (88, None), 'symlinkat': (266, 36), 'readlink': (89, None),
    'readlinkat': (267, 78), 'mknod': (133, None), 'mknodat': (259, 33), 'umask': (95, 166), 'statfs': (137, 43),
    'fstatfs': (138, 44), 'ioctl': (16, 29), 'dup': (32, 23), 'dup2': (33, None), 'dup3': (292, 24),
    'pipe': (22, None), 'pipe2': (293, 59), 'sendfile': (40, 71), 'copy_file_range': (326, 285),
    'close_range': (436, 436), 'memfd_create': (319, 279),
    # waiting
    'poll': (7, None), 'ppoll': (271, 73), 'select': (23, None), 'pselect6': (270, 72), 'epoll_create': (213, None),
    'epoll_create1': (291, 20), 'epoll_ctl': (233, 21), 'epoll_wait': (232, None), 'epoll_pwait': (281, 22),
    'epoll_pwait2': (441, 441), 'eventfd': (284, None), 'eventfd2': (290, 19), 'timerfd_create': (283, 85),
    'timerfd_settime': (286, 86), 'timerfd_gettime': (287, 87), 'futex': (202, 98), 'nanosleep': (35, 101),
    'clock_nanosleep': (230, 115), 'pause': (34, None), 'restart_syscall': (219, 128),
    # memory
    'mmap': (9, 222), 'mprotect': (10, 226), 'munmap': (11, 215), 'brk': (12, 214), 'mremap': (25, 216),
    'msync': (26, 227), 'mincore': (27, 232), 'madvise': (28, 233), 'membarrier': (324, 283),
    # processes and threads
    'clone': (56, 220), 'clone3': (435, 435), 'fork': (57, None), 'vfork': (58, None), 'execve': (59, 221),
    'execveat': (322, 281), 'exit': (60, 93), 'exit_group': (231, 94), 'wait4': (61, 260), 'waitid': (247, 95),
    'kill': (62, 129), 'tgkill': (234, 131), 'getpid': (39, 172), 'getppid': (110, 173), 'gettid': (186, 178),
    'getpgid': (121, 155), 'getpgrp': (111, None), 'getsid': (124, 156), 'getuid': (102, 174), 'geteuid': (107, 175),
    'getgid': (104, 176), 'getegid': (108, 177), 'getresuid': (118, 148), 'getresgid': (120, 150),
    'getgroups': (115, 158), 'set_tid_address': (218, 96), 'set_robust_list': (273, 99), 'rseq': (334, 293),
    'arch_prctl': (158, None), 'prctl': (157, 167), 'prlimit64': (302, 261), 'getrlimit': (97, 163),
    'getrusage': (98, 165), 'times': (100, 153), 'getpriority': (140, 141), 'sched_yield': (24, 124),
    'sched_getaffinity': (204, 123), 'sched_getparam': (143, 121), 'sched_getscheduler': (145, 120),
    'sched_get_priority_max': (146, 125), 'sched_get_priority_min': (147, 126), 'getcpu': (309, 168),
    # signals
    'rt_sigaction': (13, 134), 'rt_sigprocmask': (14, 135), 'rt_sigreturn': (15, 139), 'rt_sigpending': (127, 136),
    'rt_sigsuspend': (130, 133), 'rt_sigtimedwait': (128, 137), 'sigaltstack': (131, 132), 'alarm': (37, None),
    'getitimer': (36, 102), 'setitimer': (38, 103),
    # pairs of sockets
    'socketpair': (53, 199), 'sendto': (44, 206), 'recvfrom': (45, 207), 'sendmsg': (46, 211), 'recvmsg': (47, 212),
    'shutdown': (48, 210), 'getsockname': (51, 204), 'getpeername': (52, 205), 'getsockopt': (55, 209),
    'setsockopt': (54, 208),
    # the machine
    'time': (201, None), 'gettimeofday': (96, 169), 'clock_gettime': (228, 113), 'clock_getres': (229, 114),
    'uname': (63, 160), 'sysinfo': (99, 179), 'getrandom': (318, 278),
}  # fmt: skip
