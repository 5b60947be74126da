"""A cable between readers and a pool's HTTP port: it is torn, or lets nothing more through, when so many bytes have come to the readers."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.pools import PoolProcess


class Cable:
    """Between readers and a pool; torn when so many bytes have come to the readers. Nobody connects any more then."""

    def __init__(self, pool: PoolProcess, size_bytes: int) -> None:
        host, port = str(pool.ready["http"]).rsplit(":", 1)
        self._pool, self._left, self._ends = (host, int(port)), size_bytes, []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._open, daemon=True).start()

    @property
    def torn(self) -> bool:
        return self._left <= 0

    def tear(self) -> None:
        for end in (self._door, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, pool = self._door.accept()[0], socket.create_connection(self._pool)
                self._ends += [reader, pool]
                for source, sink, counted in ((reader, pool, False), (pool, reader, True)):
                    threading.Thread(target=self._pass, args=(source, sink, counted), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                sink.sendall(data)
                self._left -= len(data) * counted
                if not self._goes_on(counted):
                    break
        self._ended(source, sink)

    def _goes_on(self, counted: bool) -> bool:
        return not self.torn

    def _ended(self, source: socket.socket, sink: socket.socket) -> None:
        self.tear()


class HeldCable(Cable):
    """One that lets so many bytes come to the readers and then no more, until it is `free`."""

    def __init__(self, pool: PoolProcess, size_bytes: int) -> None:
        self.held, self._free = threading.Event(), threading.Event()
        super().__init__(pool, size_bytes)

    def free(self) -> None:
        self._free.set()

    def close(self) -> None:
        self.free()
        self.tear()

    def _goes_on(self, counted: bool) -> bool:
        if counted and self.torn:
            self.held.set()
            self._free.wait()
        return True

    def _ended(self, source: socket.socket, sink: socket.socket) -> None:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
