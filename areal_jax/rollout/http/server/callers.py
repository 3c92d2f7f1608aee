"""Access control of a server: callers with its key; without a key the programs of its machine, and no web page.

A page of any address may send this server a POST with the content type of a form, also under a host name that the
page's owner points at this machine (DNS rebinding). The browser reveals this by Origin, by Sec-Fetch-Site, and by the
Host that the page used. A form cannot send a body of the type application/json: for it a browser asks for permission
first (CORS preflight), which this server never gives.
"""

from __future__ import annotations

import dataclasses
import hmac

from aiohttp import hdrs, web

from areal_jax.config.addresses import is_loopback, parse_host
from areal_jax.rollout.http.wire.exchange import RequestError

# without key, and with any Host: cluster probes have no key and use pod names, and no such path generates anything
OPEN_PATHS = ('/health', '/ready', '/ping', '/metrics')
ACTING_PATHS = ('/flush_cache', '/health_generate')  # by GET too
READING = ('GET', 'HEAD', 'OPTIONS')
RULE = (
    'No web page of another address is obeyed: what may change something is refused with 403 where Origin or '
    'Sec-Fetch-Site is of another address or Host is no name of this server, and with 415 where a body is not '
    'application/json. With the key of the server any Host and any type will do.'
)  # for people
_OWN_SITES = ('same-origin', 'none')  # 'none': an address that a user has typed
_SITE = 'Sec-Fetch-Site'
_JSON = 'application/json'
_FORBIDDEN, _UNSUPPORTED = 403, 415
_SHOWN = 80  # characters of a header that a sentence repeats


@dataclasses.dataclass(frozen=True)
class Callers:
    """The access rules of one server.

    Args:
      api_key: clients must send it; '' = none.
      hosts: names by which clients without a key may call it, in addition to loopback; see config.addresses.name_hosts.
    """

    api_key: str = ''
    hosts: frozenset[str] = frozenset()

    def admit(self, request: web.Request) -> None:
        """Raises RequestError for a request without the key, and for a request that a web page may have sent."""
        if self.api_key:
            if request.path in OPEN_PATHS:
                return
            if not _has_key(request, self.api_key):
                raise RequestError(
                    'Authorization', 'Authorization must be "Bearer KEY" with the key of this server', 401
                )
        refuse_pages(request, self.hosts, is_proven=bool(self.api_key))


KEYLESS = Callers()


def refuse_pages(request: web.Request, hosts: frozenset[str], *, is_proven: bool) -> None:
    """Raises RequestError for a request that a web page of another address may have sent.

    Args:
      hosts: names of this server, in addition to loopback.
      is_proven: the sender has the key, which no page has; then any Host and any type of body are accepted.
    """
    acts = request.method not in READING or request.path in ACTING_PATHS
    called = {parse_host(authority) for authority in (request.host, *request.headers.getall(hdrs.HOST, ()))}
    if not is_proven and (acts or request.path not in OPEN_PATHS):
        _require_host(request, called, hosts)
    if acts:
        _require_origin(request, hosts | called if is_proven else hosts)
        if request.body_exists and not is_proven:
            _require_json(request)


def _require_host(request: web.Request, called: set[str], own: frozenset[str]) -> None:
    if not all(is_loopback(host) or host in own for host in called):
        raise RequestError(
            hdrs.HOST, f'Host: {request.host[:_SHOWN]!r} is no name of this server, and a web page may have made it '
            'one: ask at 127.0.0.1, or start the server with the name in --config.server.hosts, or with a key in '
            'AREAL_JAX_API_KEY', _FORBIDDEN,
        )  # fmt: skip


def _require_origin(request: web.Request, own: frozenset[str]) -> None:
    for site in request.headers.getall(_SITE, ()):
        if site not in _OWN_SITES:
            raise RequestError(
                _SITE, f'{_SITE}: {site[:_SHOWN]!r} is a web page of another address, which this server does not '
                'obey: send the request from a program', _FORBIDDEN,
            )  # fmt: skip
    for origin in request.headers.getall(hdrs.ORIGIN, ()):
        scheme, _, authority = origin.partition('://')
        host = parse_host(authority) if scheme in ('http', 'https') else ''
        if not host or not (is_loopback(host) or host in own):
            raise RequestError(
                hdrs.ORIGIN, f'Origin: {origin[:_SHOWN]!r} is a web page of another address, which this server does '
                'not obey: send the request from a program, or start the server with the host of the page in '
                '--config.server.hosts', _FORBIDDEN,
            )  # fmt: skip


def _require_json(request: web.Request) -> None:
    """Raises RequestError unless there is one content type, application/json, with any parameters."""
    types = request.headers.getall(hdrs.CONTENT_TYPE, ())
    if [one.partition(';')[0].strip().lower() for one in types] != [_JSON]:
        shown = ', '.join(types)[:_SHOWN]
        raise RequestError(
            hdrs.CONTENT_TYPE, f"Content-Type: {shown!r} is not {_JSON}, and a web page could have sent it: send the "
            f"body with -H 'content-type: {_JSON}'", _UNSUPPORTED,
        )  # fmt: skip


def _has_key(request: web.Request, api_key: str) -> bool:
    # surrogates represent bytes that are not UTF-8, in headers as in environment variables
    encode = lambda text: text.encode('utf-8', 'surrogateescape')
    matches = lambda name, wanted: hmac.compare_digest(encode(request.headers.get(name, '')), encode(wanted))
    return matches('Authorization', f'Bearer {api_key}') or matches('x-api-key', api_key)  # the second is Anthropic's
