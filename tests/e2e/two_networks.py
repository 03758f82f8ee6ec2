"""Two network namespaces joined by a slow link: programs in them share neither a network nor memory."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Runs in a namespace: makes its end of the link, a TUN device, hands that to whom it was started by, and becomes the
# command. Its user is root there, and nowhere else.
_INSIDE = """
import fcntl, os, socket, struct, subprocess, sys
channel, address, *command = sys.argv[1:]
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"far", 0x1001))  # TUNSETIFF: packets of IP alone
for words in ("link set lo up", f"addr add {address}/24 dev far", "link set far up"):
    subprocess.run(["ip", *words.split()], check=True)
subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)
with socket.socket(fileno=int(channel)) as caller:
    socket.send_fds(caller, [b"."], [tun])
os.execvp(command[0], command)
"""


class TwoNetworks:
    """A namespace for each address, and the link between them: a thread.

    Args:
        delay_s: of each packet, on either way.

    Attributes:
        num_packets: that came over the link.
    """

    def __init__(self, delay_s: float) -> None:
        self.num_packets = 0
        self._delay_s = delay_s
        self._ends: list[int] = []
        self._started: list[subprocess.Popen[str]] = []
        self._is_cut = self._is_over = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self, commands: Sequence[Sequence[str]], **options: Any) -> list[subprocess.Popen[str]]:
        """Runs a command in each namespace.

        Raises:
            OSError: namespaces are not permitted here.
        """
        for address, command in zip(ADDRESSES, commands, strict=True):
            ours, theirs = socket.socketpair()
            inside = [sys.executable, "-c", _INSIDE, str(theirs.fileno()), address, *command]
            unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", *inside]
            with ours, theirs:
                process = subprocess.Popen(unshare, pass_fds=[theirs.fileno()], text=True, **options)
                self._started.append(process)
                theirs.close()
                _, ends, _, _ = socket.recv_fds(ours, 1, 1)
            if not ends:
                raise OSError("this host permits no network namespaces, or no TUN devices in them")
            self._ends += ends
        self._thread.start()
        return self._started

    def cut(self) -> None:
        """Loses all packets from now on."""
        self._is_cut = True

    def _pass_on(self) -> None:
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        late: deque[tuple[float, int, bytes]] = deque()  # all are delayed alike: the first one is due first
        with suppress(OSError):  # a namespace is over
            while not self._is_over:
                wait = 0.1 if not late else max(0.0, late[0][0] - time.monotonic())
                for end in select.select(self._ends, [], [], wait)[0]:
                    late.append((time.monotonic() + self._delay_s, others[end], os.read(end, 1 << 16)))
                while late and late[0][0] <= time.monotonic():
                    _, end, packet = late.popleft()
                    if not self._is_cut:
                        os.write(end, packet)
                        self.num_packets += 1

    def close(self) -> None:
        """Ends what still runs, and the link."""
        self._is_over = True
        for process in self._started:
            with process:  # closes what it wrote to, and waits
                process.kill()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)


def are_permitted() -> bool:
    """True where namespaces and their link can be made."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    networks = TwoNetworks(0.0)
    try:
        networks.start([["true"], ["true"]], stderr=subprocess.DEVNULL)
    except OSError:
        return False
    finally:
        networks.close()
    return True
