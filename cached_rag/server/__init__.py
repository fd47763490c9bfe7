"""An OpenAI-compatible server over one engine (extra `serve`). Its settings need no extra."""

import ipaddress
import math
import re
from dataclasses import dataclass

from cached_rag.options import check_range, check_types, require

# As browsers write it: a scheme and a host, with nothing behind; "null" is a page in a file.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, to whom, and how much it takes on.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes any that is free.
        name: what clients call the model; None for its own name.
        api_key: KEY or TENANT:KEY of those who may ask; several may be given.
        no_keys: listen on the network without any key.
        allowed_host: a name the server is asked under, besides its own; several may be given.
        cors_origin: a web page whose scripts may ask, https://host; several may be given.
        max_body_bytes: most bytes of a request.
        max_connections: most connections.
        client_seconds: seconds that a client has to send a request, or to read on.
        drain_seconds: seconds for running answers to finish when the server is stopped.

    Raises:
        ConfigError: a host or an origin that no request could have, or no key where one is needed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_key: tuple[str, ...] = ()
    no_keys: bool = False
    allowed_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_connections: int = 1000
    client_seconds: int = 60
    drain_seconds: int = 30

    def __post_init__(self) -> None:
        check_types(self)
        require(
            bool(self.api_key) or self.no_keys or self.is_local,
            f"anybody who reaches {self.host or 'this machine'} could ask and delete; give "
            "--api-key, or --no-keys if that is meant",
        )
        check_range(self, 1, math.inf, "max_body_bytes", "max_connections", "client_seconds")
        check_range(self, 0, math.inf, "drain_seconds")
        for host in self.allowed_host:
            require(
                bool(host) and "/" not in host,
                f"--allowed-host {host!r} is no host: requests name it without scheme and path; "
                "give server.example, say",
            )
        for origin in self.cors_origin:
            require(
                bool(_ORIGIN.fullmatch(origin)),
                f"--cors-origin {origin!r} is no origin: browsers name a page by scheme and host "
                "alone; give https://page.example, say, or * for any",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
