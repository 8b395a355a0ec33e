"""Bodies are read and checked by us, off the event loop when they are large; here they are put into the OpenAPI document."""

from typing import Any

from pydantic import BaseModel


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route says about its body (FastAPI's `openapi_extra`)."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}
