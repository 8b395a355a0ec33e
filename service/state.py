"""What the routes share: the settings, the metrics, the models, and whether the service is shutting down."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.requests import HTTPConnection

from service.leftovers import Leftovers

if TYPE_CHECKING:
    from service.metrics import Metrics
    from service.served import Models
    from service.settings import Settings


@dataclass
class State:
    """One per application. `busy` counts the requests being answered, those of operations left out."""

    settings: "Settings"
    metrics: "Metrics"
    models: "Models"
    draining: bool = False
    busy: int = 0
    leftovers: Leftovers = field(default_factory=Leftovers)


def state_of(connection: HTTPConnection) -> State:
    """The state of the application that serves a request."""
    return cast(State, connection.app.state.attend)
