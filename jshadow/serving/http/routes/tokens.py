"""The routes of tokens: /tokenize and /detokenize, as vLLM has them."""

from typing import Any

from fastapi import APIRouter, Request

from jshadow.engine.text import encode
from jshadow.serving.http.bodies import JsonRoute
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.responses import ERRORS
from jshadow.serving.http.routes.answers import chat_tokens, unless_gone
from jshadow.serving.http.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from jshadow.serving.http.service import Service

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a text or a chat."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "the body must have either prompt or messages", param="prompt")
    if body.messages is not None:
        switches = body.chat_template_kwargs
        chat = ChatRequest(model=service.options.name, messages=body.messages, chat_template_kwargs=switches)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        ids = await unless_gone(request, chat_tokens(service, chat, tools), service.options.seconds)
    elif not body.prompt:
        ids = []
    else:
        service.check_length(body.prompt)
        args = service.params.tokenizer, body.prompt, service.params.config.vocab_size
        ids = await service.slowly(lambda: encode(*args, special=body.add_special_tokens))
    told = {"tokens": ids, "count": len(ids), "max_model_len": service.most_tokens}
    if body.return_token_strs:
        told["token_strs"] = service.params.tokenizer.convert_ids_to_tokens(ids)
    return told


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of token ids."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    size = service.params.config.vocab_size
    bad = [token for token in body.tokens if not 0 <= token < size]
    if bad:
        raise ApiError(400, f"tokens must lie in [0, vocab_size={size}), got {bad[0]}", param="tokens")
    return {"prompt": await service.slowly(service.params.tokenizer.decode, body.tokens)}
