"""The routes of the server's state: models, health, metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from jshadow.server.errors import ApiError
from jshadow.server.responses import ERRORS
from jshadow.server.service import Service

router = APIRouter()


@router.get("/v1/models", responses=ERRORS)
async def models(request: Request) -> dict[str, Any]:
    """List the model."""
    return {"object": "list", "data": [model_of(request.app.state.service)]}


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def model(request: Request, name: str) -> dict[str, Any]:
    """Return the model."""
    service: Service = request.app.state.service
    service.check_model(name)
    return model_of(service)


def model_of(service: Service) -> dict[str, Any]:
    """Return the model in OpenAI's form."""
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "jshadow",
        "max_model_len": service.most_tokens,
    }


@router.get("/health", responses={500: ERRORS[500], 503: ERRORS[503]})
async def health(request: Request) -> dict[str, str]:
    """Say that the process lives. 503: its engine has failed."""
    failure = request.app.state.service.engine.failure
    if failure is not None:
        raise ApiError(503, f"the engine has failed: {failure}", code="engine_failed")
    return {"status": "ok"}


@router.get("/ready", responses={500: ERRORS[500], 503: ERRORS[503]})
async def ready(request: Request) -> JSONResponse:
    """Say whether requests are welcome: not before all programs are compiled, and not while the server ends."""
    service: Service = request.app.state.service
    if service.ready and not service.draining and service.engine.failure is None:
        return JSONResponse({"status": "ready"})
    raise ApiError(503, "the server ends" if service.draining else "the server compiles its programs", code="not_ready")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' text form."""
    text = request.app.state.service.metrics.text()
    return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")


@router.get("/v1/gauge", responses=ERRORS)
async def gauge(request: Request) -> dict[str, Any]:
    """The figures of the page: bytes by tier, the share of hits, times, and what full attention would hold."""
    service: Service = request.app.state.service
    return await service.slowly(service.gauge)
