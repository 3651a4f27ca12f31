"""Become a server that dies with its keeper: `launch.py KEEPER_PID SIGNAL IDENTITY COMMAND…`.

Run as a script, standard library only, so that it starts in a few milliseconds. IDENTITY is

* `plain`: as we are;
* `userns`: in a user namespace of its own, where our uid (root) is called 65534. Postgres refuses
  uid 0, and this changes neither files nor users;
* `nobody`: as uid 65534 for real, where user namespaces are not allowed.

`check` as COMMAND tests instead that every further argument can be reached under that identity.
Exits 75 where the identity cannot be taken, 77 where a path cannot be reached.
"""

import ctypes
import os
import signal
import sys

IDENTITY_REFUSED = 75
UNREACHABLE = 77
NOBODY = 65534

_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Take the identity, ask for the death signal, exec. Returns only by exiting."""
    keeper_pid, death_signal, identity, *command = arguments
    try:
        _take(identity)
    except OSError as error:
        _fail(IDENTITY_REFUSED, f"cannot run as {identity}: {error}")
    if command[0] == "check":
        paths = command[1:]
        sys.exit(0 if all(os.access(p, os.R_OK | os.X_OK) for p in paths) else UNREACHABLE)
    # After the identity: a change of credentials clears the death signal.
    die_with_parent(int(death_signal), int(keeper_pid))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execv(command[0], command)
    except PermissionError as error:
        _fail(UNREACHABLE, f"cannot run {command[0]} as {identity}: {error}")


def die_with_parent(death_signal: int, parent_pid: int) -> None:
    """Ask the kernel for `death_signal` when the parent's thread that started us ends (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the request.
    if os.getppid() != parent_pid:
        sys.exit(0)


def launch_command(identity: str, death_signal: int, command: list[str]) -> list[str]:
    """`command` as a child of this process that takes `identity` and dies with us."""
    script = [sys.executable, "-I", "-S", __file__]
    return [*script, str(os.getpid()), str(int(death_signal)), identity, *command]


def _take(identity: str) -> None:
    if identity == "userns":
        uid, gid = os.getuid(), os.getgid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER)")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {uid} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    elif identity == "nobody":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _fail(code: int, message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
