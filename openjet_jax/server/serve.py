"""Runs a server in this process until it is told to stop."""

import socket

import uvicorn

from openjet_jax.loading import Model
from openjet_jax.server.app import create_app
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.security import MAX_HEADER_BYTES
from openjet_jax.server.service import Service


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
    _server(service, config).run()
