"""The routes of files: /v1/files. Each file becomes a stored document."""

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse

from jshadow.library import Stored
from jshadow.server.errors import ApiError
from jshadow.server.responses import ERRORS
from jshadow.server.service import Service, file_id_of
from jshadow.server.uploads import Upload, plain_name

router = APIRouter(prefix="/v1/files", responses=ERRORS)


def described(stored: Stored, created: int) -> dict[str, Any]:
    """Return a file in OpenAI's form, with the tokens, the tier and the bytes of its state."""
    known = {} if stored.problem is None else {"status_details": stored.problem}
    return {
        "id": file_id_of(stored),
        "object": "file",
        "bytes": stored.bytes,
        "created_at": created,
        "filename": stored.title,
        "purpose": "user_data",
        "status": "processed" if stored.problem is None else "error",
        "tokens": stored.tokens,
        "tier": stored.tier,
    } | known


@router.get("")
async def list_files(request: Request) -> dict[str, Any]:
    """List the stored documents."""
    service: Service = request.app.state.service
    await service.slowly(service.look)
    found = await service.slowly(service.shelf().documents)
    data = [described(one, service.created) for one in found if one.ends != "answer"]
    return {"object": "list", "data": data, "has_more": False, "first_id": None, "last_id": None}


@router.post("")
async def add_file(
    request: Request, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()] = "user_data"
) -> dict[str, Any]:
    """Read a document, and store its state. The response comes when it is stored."""
    service: Service = request.app.state.service
    if purpose not in ("user_data", "assistants"):
        raise ApiError(400, f"purpose must be user_data or assistants, got {purpose!r:.80}", param="purpose")
    data = await file.read(service.options.upload_bytes + 1)
    if len(data) > service.options.upload_bytes:
        raise ApiError(413, f"file must have at most {service.options.upload_bytes} bytes, got more", param="file")
    return described(await service.add(Upload(plain_name(file.filename), data)), service.created)


@router.get("/{file_id}")
async def get_file(request: Request, file_id: str) -> dict[str, Any]:
    """Return one stored document."""
    service: Service = request.app.state.service
    return described(await service.slowly(service.file, file_id), service.created)


@router.get("/{file_id}/content", response_class=PlainTextResponse)
async def file_content(request: Request, file_id: str) -> str:
    """Return the text of a stored document, decoded from its tokens."""
    service: Service = request.app.state.service
    ids = await service.slowly(service.file_tokens, file_id)
    return await service.slowly(service.params.tokenizer.decode, ids)


@router.delete("/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Remove a stored document. Answers that use it go on."""
    service: Service = request.app.state.service
    stored = await service.slowly(service.file, file_id)
    await service.slowly(service.shelf().remove, stored.key)
    return {"id": file_id, "object": "file", "deleted": True}
