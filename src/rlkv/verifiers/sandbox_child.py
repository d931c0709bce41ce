"""Child side of the sandbox: locks itself in, runs untrusted code, and reports plain values.

Run by ``sandbox.py`` as ``python -c <this source>``, never imported by the package. The request,
one JSON object on standard input, holds the code and the expressions to evaluate, not what they
should be equal to. Before the code runs, this process gives up for good: writing any file, reading
any but the interpreter's, creating processes and threads, sockets, and signals to others (rlimits,
Landlock, then a seccomp allow-list of system calls). Nothing this process says is trusted: the
parent compares the values it sends.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import types

# name: (x86_64, generic table of aarch64 and riscv64); the calls that pure computation and imports
# of the standard library need. Everything else fails with EPERM.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "stat": (4, None),
    "lstat": (6, None), "access": (21, None), "newfstatat": (262, 79), "statx": (332, 291),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61), "getcwd": (79, 17),
    "readlink": (89, None), "readlinkat": (267, 78), "dup": (32, 23), "futex": (202, 98),
    "sched_yield": (24, 124), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "uname": (63, 160), "sysinfo": (99, 179), "times": (100, 153), "getrusage": (98, 165),
    "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128), "rseq": (334, 293),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "sched_getaffinity": (204, 123),
    "getcpu": (309, 168), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72),
}  # fmt: skip
OPEN = {"open": (2, None, 1), "openat": (257, 56, 2)}  # last: index of the flags argument
FCNTL = (72, 25)
WRITING_FLAGS = 0o1103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "riscv64": (1, 0xC00000F3)}
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277, "riscv64": 277}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on all machines

LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, number: int, *arguments: object) -> int:
    """One raw system call; raises OSError when it fails."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def limit_resources(memory_bytes: int, cpu_s: int) -> None:
    """Caps memory, processor time, files and processes."""
    for which, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(which, (value, value))


def readable_paths() -> list[str]:
    """What imports need: the standard library and the shared libraries of the system."""
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return [path for path in [*sys.path, *system] if path and os.path.exists(path)]


def restrict_files() -> None:
    """Landlock: read the interpreter's files and nothing else; no TCP, no signals to others."""
    abi = call("landlock", LANDLOCK_CREATE, None, 0, 1)
    # access rights of the file system: 13 in ABI 1, then refer, truncate, (network), ioctl
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network, scoped = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", rights, network, scoped)[
        : {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}.get(abi, 24)
    ]
    ruleset = call("landlock_create_ruleset", LANDLOCK_CREATE, attributes, len(attributes), 0)
    read_file, read_dir = 1 << 2, 1 << 3
    for path in readable_paths():
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = read_file | (read_dir if os.path.isdir(path) else 0)
        rule = struct.pack("=Qi", access, handle)
        call("landlock_add_rule", LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(handle)
    call("landlock_restrict_self", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def seccomp_program(machine: str) -> bytes:
    """The filter, as classic BPF: allow the listed calls, fail the others with EPERM."""
    column, audit_arch = MACHINES[machine]
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000

    def load(offset: int) -> tuple[int, int, int, int]:
        return (0x20, 0, 0, offset)

    def skip_unless(value: int, distance: int) -> tuple[int, int, int, int]:
        return (0x15, 0, distance, value)  # jump if not equal

    low = 0 if sys.byteorder == "little" else 4
    program = [load(4), (0x15, 1, 0, audit_arch), (0x06, 0, 0, kill), load(0)]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            program += [skip_unless(numbers[column], 1), (0x06, 0, 0, allow)]
    for *numbers, flags_index in OPEN.values():
        if numbers[column] is not None:
            program += [skip_unless(numbers[column], 4), load(16 + 8 * flags_index + low)]
            # 0x45: jump if any of the bits is set
            program += [(0x45, 0, 1, WRITING_FLAGS), (0x06, 0, 0, deny), (0x06, 0, 0, allow)]
    # fcntl: duplicate and flags only; F_SETOWN could make the kernel send signals for us
    program += [skip_unless(FCNTL[column], 5), load(16 + 8 + low)]
    program += [(0x15, 1, 0, 1030), (0x25, 1, 0, 3), (0x06, 0, 0, allow), (0x06, 0, 0, deny)]
    program += [(0x06, 0, 0, deny)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def restrict_calls() -> None:
    """Installs the seccomp filter on this process."""
    machine = platform.machine()
    code = seccomp_program(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    call("seccomp", SYS_SECCOMP[machine], 1, 0, header)  # 1: SECCOMP_SET_MODE_FILTER


def encode(value: object, depth: int = 0) -> list:
    """A value as tagged JSON; anything but plain data becomes ``["?", type name]``."""
    if depth > 40:
        return ["?", "nested too deeply"]
    if value is None or isinstance(value, bool):
        return ["p", value]
    if isinstance(value, int):
        return ["i", format(int(value), "x")]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        return ["s", str(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["y", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    for tag, kind in (("l", list), ("t", tuple), ("z", frozenset), ("z", set)):
        if isinstance(value, kind):
            return [tag, [encode(item, depth + 1) for item in value]]
    return ["?", type(value).__name__]


def main() -> None:
    """Reads the request, locks the process in, runs it, and reports a line an expression."""
    request = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)

    def say(message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(channel, data) :]

    try:
        limit_resources(request["memory_bytes"], request["cpu_s"])
        if LIBC.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
            raise OSError("prctl(PR_SET_NO_NEW_PRIVS) failed")
        restrict_files()
        restrict_calls()
    except (OSError, KeyError) as error:
        say(["unavailable", str(error)])
        return
    say(["ready"])
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        exec(compile(request["code"], "<candidate>", "exec"), module.__dict__)
    except BaseException as error:
        say(["failed", type(error).__name__])
        return
    for expression in request["expressions"]:
        try:
            say(["value", encode(eval(expression, module.__dict__))])
        except BaseException as error:
            say(["failed", type(error).__name__])


if __name__ == "__main__":
    main()
