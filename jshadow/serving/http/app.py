"""The ASGI app of a server."""

from typing import Any

from fastapi import FastAPI

from jshadow.serving.http.access import Access
from jshadow.serving.http.errors import add_handlers
from jshadow.serving.http.routes import answers_router, files_router, page_router, status_router, tokens_router
from jshadow.serving.http.service import Service

_ABOUT = "OpenAI's routes over one long-context model and a library of documents that were read once."


def make_app(service: Service) -> FastAPI:
    """Return the app. Its routes are those of `jshadow serve`."""
    app = FastAPI(title="jshadow serve", description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    add_handlers(app)
    for router in (answers_router, files_router, tokens_router, status_router, page_router):
        app.include_router(router)
    app.add_middleware(Access, service=service)
    make_schema = app.openapi

    def schema() -> dict[str, Any]:
        """Return the OpenAPI schema without FastAPI's status 422, for which this server answers 400."""
        made = make_schema()
        for route in made["paths"].values():
            for method in route.values():
                method["responses"].pop("422", None)
        return made

    app.openapi = schema  # type: ignore[method-assign]
    return app
