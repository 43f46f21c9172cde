"""The routes of files: /v1/files. Each file becomes a stored document."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from jshadow.errors import CheckpointError, DocumentError
from jshadow.library import Stored
from jshadow.serving.http.access import client_of
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.replies import FileDeleted, FileList, FileObject
from jshadow.serving.http.responses import ERRORS, PLAIN
from jshadow.serving.http.routes.answers import unless_gone
from jshadow.serving.http.service import Service, file_id_of
from jshadow.serving.http.uploads import Upload, not_kept, plain_name


class FormRoute(APIRoute):
    """A route whose form lies in temporary files while it is read. Without room for them, it answers 503."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except HTTPException as error:
                if isinstance(error.__cause__, OSError):
                    raise not_kept("of the form", error.__cause__) from error
                raise

        return handler


router = APIRouter(prefix="/v1/files", responses=ERRORS, route_class=FormRoute)


def described(service: Service, stored: Stored) -> FileObject:
    """Return a file in OpenAI's form, with the tokens, the tier and the bytes of its state."""
    return FileObject(
        id=file_id_of(stored),
        bytes=stored.bytes,
        created_at=service.file_time(stored),
        filename=stored.title,
        status="processed" if stored.problem is None else "error",
        status_details=stored.problem,
        tokens=stored.tokens,
        tier=stored.tier,
    )


@router.get("", response_model_exclude_none=True)
async def list_files(request: Request) -> FileList:
    """List the stored documents."""
    service: Service = request.app.state.service
    await service.slowly(service.look)

    def listed() -> list[FileObject]:
        return [described(service, one) for one in service.shelf().documents() if one.ends != "answer"]

    return FileList(data=await service.slowly(listed))


@router.post("", response_model=FileObject, response_model_exclude_none=True)
async def add_file(
    request: Request, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()] = "user_data"
) -> Any:
    """Read a document, and store its state. The response comes when it is stored.

    The reading ends if the client leaves.
    """
    service: Service = request.app.state.service
    options = service.options
    if purpose not in ("user_data", "assistants"):
        raise ApiError(400, f"purpose must be user_data or assistants, got {purpose!r:.80}", param="purpose")
    name = plain_name(file.filename)
    data = await file.read(options.upload_bytes + 1)
    if len(data) > options.upload_bytes:
        raise ApiError(413, f"file must have at most {options.upload_bytes} bytes, got more", param="file")

    async def added() -> dict[str, Any]:
        return described(service, await service.add(Upload(name, data), client_of(request))).model_dump()

    return await unless_gone(request, added(), options.seconds)


@router.get("/{file_id}", response_model_exclude_none=True)
async def get_file(request: Request, file_id: str) -> FileObject:
    """Return one stored document."""
    service: Service = request.app.state.service
    return described(service, await service.slowly(service.file, file_id))


@router.get("/{file_id}/content", response_class=Response, responses=PLAIN)
async def file_content(request: Request, file_id: str) -> PlainTextResponse:
    """Return the text of a stored document, decoded from its tokens."""
    service: Service = request.app.state.service
    return PlainTextResponse(await service.slowly(service.file_text, file_id))


@router.delete("/{file_id}")
async def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Remove a stored document. Answers that use it go on."""
    service: Service = request.app.state.service
    stored = await service.slowly(service.file, file_id)
    try:
        await service.slowly(service.shelf().remove, stored.key)
    except DocumentError as error:  # somebody else has removed it meanwhile
        message = f"file_id must be that of a stored file, got {file_id!r:.80}"
        raise ApiError(404, message, code="file_not_found") from error
    except CheckpointError as error:
        raise ApiError(503, f"file {file_id} cannot be removed: {error}", code="store_unavailable") from error
    return FileDeleted(id=file_id)
