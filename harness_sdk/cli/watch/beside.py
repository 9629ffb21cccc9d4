"""The live page beside the services of one machine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness_sdk.cli.stack import LocalStack
    from harness_sdk.cli.stack_config import StackConfig


@contextlib.asynccontextmanager
async def page_beside(config: StackConfig, stack: LocalStack) -> AsyncGenerator[str]:
    """The page of `stack`, which has started; yields its address, nothing for `page_port` None."""
    if config.page_port is None:
        yield ""
        return
    from harness_sdk.cli.watch.server import watching

    tokenizer = config.model / "tokenizer.json"
    async with watching(
        config.run,
        redis_url=stack.redis_url,
        mqtt_url=stack.mqtt_url,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        port=config.page_port,
        token=config.token.get_secret_value() if config.token is not None else None,
    ) as url:
        yield url
