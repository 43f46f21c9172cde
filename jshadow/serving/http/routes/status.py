"""The routes of the server's state: models, health, metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.replies import Gauge, ModelList, ModelObject, Status
from jshadow.serving.http.responses import ERRORS, PLAIN
from jshadow.serving.http.service import Service

router = APIRouter()


@router.get("/v1/models", responses=ERRORS)
async def models(request: Request) -> ModelList:
    """List the model."""
    return ModelList(data=[model_of(request.app.state.service)])


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def model(request: Request, name: str) -> ModelObject:
    """Return the model."""
    service: Service = request.app.state.service
    service.check_model(name)
    return model_of(service)


def model_of(service: Service) -> ModelObject:
    """Return the model in OpenAI's form."""
    return ModelObject(id=service.options.name, created=service.created, max_model_len=service.most_tokens)


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={500: ERRORS[500], 503: ERRORS[503]})
async def health(request: Request) -> Status:
    """Say that the process lives. 503: its engine has failed."""
    if request.app.state.service.engine.failure is not None:
        raise engine_failed()
    return Status(status="ok")


def engine_failed() -> ApiError:
    """Return the error of a server that answers nothing more. Its reason is not for clients without a key."""
    return ApiError(503, "the engine has failed, and the log of the server has the reason", code="engine_failed")


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={500: ERRORS[500], 503: ERRORS[503]})
async def ready(request: Request) -> Status:
    """Say whether requests are welcome: not before all programs are compiled, and not while the server ends."""
    service: Service = request.app.state.service
    if service.ready and not service.draining and service.engine.failure is None:
        return Status(status="ready")
    if service.engine.failure is not None:
        raise engine_failed()
    raise ApiError(503, "the server ends" if service.draining else "the server compiles its programs", code="not_ready")


@router.get("/metrics", response_class=Response, responses=PLAIN | {500: ERRORS[500]})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' text form."""
    service: Service = request.app.state.service
    return Response(await service.slowly(service.metrics.text), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/gauge", responses=ERRORS)
async def gauge(request: Request) -> Gauge:
    """The figures of the page: bytes by tier, the share of hits, times, and what full attention would hold."""
    service: Service = request.app.state.service
    return Gauge(**await service.slowly(service.gauge))
