"""The routes of the page at /: one HTML file with its style and its scripts, and nothing from elsewhere."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from jshadow.serving.http.errors import ApiError

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def page() -> Response:
    """The page over the stored documents."""
    return await part("page.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    """One file of the page. Raises ApiError if there is none of this name."""
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name!r:.80}")
    path = FILES[name]
    return Response(path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8", headers=HEADERS)
