"""A TCP proxy on the loopback interface, which can pause and cut its connections."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Any

#: A thread looks so often whether the proxy is closed [s], and copies so much at a time [B].
_LOOK_S, _NBYTES = 0.2, 2**16


class Proxy:
    """Forwards connections to another port of this host.

    Parameters
    ----------
    port : int
        It is forwarded to.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._spawn(self._accept)

    @property
    def address(self) -> str:
        """Address of the proxy, as Dask writes it."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def pause(self) -> None:
        """Keep all bytes until `resume`; connections stay open."""
        self._flows.clear()

    def resume(self) -> None:
        """Let bytes pass again."""
        self._flows.set()

    def cut(self, which: float) -> None:
        """Close one of the connections, chosen by a number from 0 to 1."""
        with self._lock:
            if self._pairs:
                self._end(self._pairs.pop(int(which * len(self._pairs))))

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self._flows.set()
        self._listener.close()
        with self._lock:
            for pair in self._pairs:
                self._end(pair)

    @staticmethod
    def _spawn(function: Any, *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    @staticmethod
    def _end(pair: tuple[socket.socket, socket.socket]) -> None:
        for one in pair:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                continue
            with self._lock:
                self._pairs.append((near, far))
            self._spawn(self._copy, near, far)
            self._spawn(self._copy, far, near)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while not self._is_closed:
                if not select.select([source], [], [], _LOOK_S)[0]:
                    continue
                self._flows.wait()
                data = source.recv(_NBYTES)
                if not data:
                    break
                target.sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            self._end((source, target))
