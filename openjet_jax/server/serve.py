"""Runs a server in this process until it is told to stop."""

import ctypes
import socket
import threading
import time

import uvicorn

from openjet_jax.loading import Model
from openjet_jax.server.app import create_app
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.security import MAX_HEADER_BYTES
from openjet_jax.server.service import Service

RETURN_EVERY_S = 5


class Server(uvicorn.Server):
    """A server that says where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        if self.started:
            host, port = self.config.host, self.servers[0].sockets[0].getsockname()[1]
            print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def server_of(model: Model, config: ServerConfig) -> Server:
    """Returns a server that is not running yet; its `run` serves until a signal."""
    return _server(Service(model, config), config)


def _server(service: Service, config: ServerConfig) -> Server:
    return Server(
        uvicorn.Config(
            create_app(service, config),
            host=config.host,
            port=config.port,
            http="h11",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=config.shutdown_s,
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_level="warning",
        )
    )


def serve(model: Model, config: ServerConfig) -> None:
    """Serves until interrupted or terminated; running answers get `shutdown_s` to end."""
    service = Service(model, config)
    service.warm_up()
    threading.Thread(target=_return_memory, daemon=True).start()
    _server(service, config).run()


def _return_memory() -> None:
    """Gives what the C library keeps of freed memory back to the system, again and again.

    On a CPU, programs take their workspace from it in many threads; what each of them once needed
    would stay. Only glibc can be asked to.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        trim(0)
        time.sleep(RETURN_EVERY_S)
