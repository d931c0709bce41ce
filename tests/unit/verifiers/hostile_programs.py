"""Programs that try to pass without solving the problem, or to do damage.

Each defines or fails to define ``f``; the tests assert ``f(i)`` equal to secrets that are written
in a file, so a program that could read it would pass. Names in angle brackets are filled in by the
test: a secret file, a folder anyone may write, a victim's process id, and ports with listeners.
"""

# ruff: noqa: E501 - one program a line reads best

from __future__ import annotations

READS = {
    "read the secret": "def f(i): return open('<secret>').read().split()[i]",
    "read it through os.open": "import os\ndef f(i): return os.read(os.open('<secret>', 0), 99).decode().split()[i]",
    "read it through a link": "import os\nos.symlink('<secret>', '<folder>/link')\ndef f(i): return open('<folder>/link').read().split()[i]",
    "read it through a hard link": "import os\nos.link('<secret>', '<folder>/hard')\ndef f(i): return open('<folder>/hard').read().split()[i]",
    "read it through /proc": "def f(i): return open('/proc/self/root<secret>').read().split()[i]",
    "read passwords": "print(open('/etc/passwd').read())\ndef f(i): return open('/etc/passwd').read()[i]",
    "list a folder": "import os\nFOUND = os.listdir('<folder>')\ndef f(i): return FOUND[i]",
    "read the parent's memory": "import os\nMAPS = open(f'/proc/{os.getppid()}/maps').read()\ndef f(i): return MAPS",
    "read the parent's arguments": "import os\nARGS = open(f'/proc/{os.getppid()}/cmdline').read()\ndef f(i): return ARGS",
    "run another program": "import subprocess\ndef f(i): return subprocess.check_output(['cat', '<secret>']).decode().split()[i]",
    "exec another program": "import os\nos.execv('/bin/cat', ['cat', '<secret>'])",
    "trace the parent": "import ctypes, os\nR = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\ndef f(i): return R",
    "chroot": "import os\nos.chroot('<folder>')\nos.chdir('..')\ndef f(i): return open('<secret>').read().split()[i]",
}

WRITES = {
    "write a file": "open('<folder>/written', 'w').write('x')\ndef f(i): return 'x'",
    "write to the working folder": "open('written', 'w').write('x')\ndef f(i): return 'x'",
    "write to /dev/shm": "open('/dev/shm/<tag>', 'w').write('x')\ndef f(i): return 'x'",
    "make a folder": "import os\nos.mkdir('<folder>/made')\ndef f(i): return 'x'",
    "truncate the secret": "import os\nos.open('<secret>', os.O_RDONLY | os.O_TRUNC)\ndef f(i): return 'x'",
    "delete the secret": "import os\nos.unlink('<secret>')\ndef f(i): return 'x'",
    "rename the secret": "import os\nos.rename('<secret>', '<folder>/moved')\ndef f(i): return 'x'",
    "open the secret to all": "import os\nos.chmod('<secret>', 0o777)\ndef f(i): return 'x'",
    "make a socket file": "import socket\nsocket.socket(socket.AF_UNIX).bind('<folder>/sock')\ndef f(i): return 'x'",
    "mount": "import ctypes\nctypes.CDLL(None).mount(b'none', b'<folder>', b'tmpfs', 0, None)\ndef f(i): return 'x'",
}

NETWORK = {
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', <tcp>), 1).send(b'hello')\ndef f(i): return 'x'",
    "UDP": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', ('127.0.0.1', <udp>))\ndef f(i): return 'x'",
    "UDP by system call": "import ctypes\nL = ctypes.CDLL(None)\nfd = L.syscall(41, 2, 2, 0)\ndef f(i): return fd",
    "io_uring": "import ctypes\nR = ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256))\ndef f(i): return R",
    "x32 system call": "import ctypes\nR = ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 2, 0)\ndef f(i): return R",
    "listen": "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\ndef f(i): return 'x'",
}

PROCESSES = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that goes on": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\ndef f(i): return 'x'",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print); p.start(); p.join()\ndef f(i): return 'x'",
    "kill a process": "import os, signal\nos.kill(<victim>, signal.SIGKILL)\ndef f(i): return 'x'",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(i): return 'x'",
    "kill everything": "import os\nos.kill(-1, 9)\ndef f(i): return 'x'",
    "signals by fcntl": "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, <victim>)\ndef f(i): return 'x'",
    "ignore signals and loop": "import signal\nfor s in range(1, 30):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "call that never returns": "def f(i):\n    while True: pass",
}

MEMORY = {
    "two GiB": "x = bytearray(2 * 2**30)\ndef f(i): return 'x'",
    "endless list": "x = []\nwhile True: x.append('y' * 10**6)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(i): return f(i + 1)",
    "lift the limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(2 * 2**30)\ndef f(i): return 'x'",
    "endless output": "def f(i): return 'x' * 10**8",
    "endless printing": "while True: print('x' * 10**6)",
    "deep value": "def f(i):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "crash": "import ctypes\nctypes.string_at(0)",
}

FORGERIES = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit(0) when called": "import os\ndef f(i): os._exit(0)",
    "raise SystemExit when called": "def f(i): raise SystemExit(0)",
    "equal to everything": "class A:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\ndef f(i): return A()",
    "str equal to everything": "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef f(i): return A('x')",
    "not unequal": "class A(str):\n    def __ne__(self, other): return False\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(i): return A()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.eval = lambda *a: True\nbuiltins.exec = lambda *a: None\ndef f(i): return True",
    "patched json": 'import json\njson.dumps = lambda *a, **k: \'["value", ["p", true]]\'\ndef f(i): return True',
    "patched encoder": "import __main__\n__main__.encode = lambda *a: ['p', True]\ndef f(i): return True",
    "writes replies itself": 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'["value",["p",true]]\\n\' * 9)\n    except OSError: pass\nos._exit(0)',
    "claims no sandbox": 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'["unavailable","x"]\\n\')\n    except OSError: pass\nos._exit(0)',
    "steals from frames": "import sys, re\ndef f(i):\n    frame, seen = sys._getframe(), ''\n    while frame: seen += repr(frame.f_locals) + repr(frame.f_globals); frame = frame.f_back\n    return re.findall(r'secret-\\w+', seen)[i]",
    "steals from the heap": "import gc, re\ndef f(i): return re.findall(r'secret-\\w+', repr(gc.get_objects()))[i]",
    "steals from the request": "import os\ndef f(i):\n    os.lseek(0, 0, 0)\n    return os.read(0, 10**6).decode()",
    "steals from its arguments": "import sys, os\ndef f(i): return repr((sys.orig_argv, dict(os.environ)))",
    "traces its caller": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(i): return sys.gettrace()",
    "jump to int 0x80": "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3')\nA = ctypes.addressof(ctypes.c_char.from_buffer(m))\nR = ctypes.CFUNCTYPE(ctypes.c_int)(A)()\ndef f(i): return R",
    "not Python": "this is not python",
    "nothing": "",
}

ALL = {**READS, **WRITES, **NETWORK, **PROCESSES, **MEMORY, **FORGERIES}
QUICK = (
    "read the secret", "write a file", "UDP", "TCP", "fork bomb", "two GiB", "sys.exit(0)",
    "equal to everything", "patched builtins", "writes replies itself", "steals from the heap",
)  # fmt: skip
