"""Runs a server in this process until it is told to stop."""

import uvicorn

from openjet_jax.loading import Model
from openjet_jax.server.app import create_app
from openjet_jax.server.config import ServerConfig
from openjet_jax.server.security import MAX_HEADER_BYTES
from openjet_jax.server.service import Service


def server_of(model: Model, config: ServerConfig) -> uvicorn.Server:
    """Returns a server that is not running yet; its `run` serves until a signal."""
    return _server(Service(model, config), config)


def _server(service: Service, config: ServerConfig) -> uvicorn.Server:
    return uvicorn.Server(
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
    server = _server(service, config)
    where = f"[{config.host}]" if ":" in config.host else config.host
    print(f"serving on http://{where}:{config.port}", flush=True)
    server.run()
