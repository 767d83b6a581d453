"""An agent with Claude Code's tools whose context stays small. Needs the packages
`claude-agent-sdk` and `coatcheck[mcp]`, and ANTHROPIC_API_KEY.

    python examples/claude_agent.py "Which path fails most often in access.log?"
"""

import asyncio
import os
import sys
from typing import Any

from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ResultMessage,
    TextBlock,
    ToolUseBlock,
    query,
)

import coatcheck
from coatcheck import Store
from coatcheck.adapters.claude_agent import slim

MODEL = os.environ.get("ANTHROPIC_MODEL", "claude-sonnet-5")


async def agent(store: Store, question: str, **options: Any) -> str:
    """Ask with Bash and Read allowed. Large outputs are stored, and the model reads what it needs
    of them."""
    mine = ClaudeAgentOptions(model=MODEL, allowed_tools=["Bash", "Read"], **options)
    answer = ""
    async for message in query(prompt=question, options=ClaudeAgentOptions(**slim(store, mine))):
        if isinstance(message, AssistantMessage):
            for block in message.content:
                if isinstance(block, TextBlock):
                    print(block.text)
                elif isinstance(block, ToolUseBlock):
                    print(f"[{block.name}]")
        elif isinstance(message, ResultMessage):
            answer = message.result or ""
    return answer


if __name__ == "__main__":
    with coatcheck.open("./.coatcheck") as opened:
        asyncio.run(agent(opened, " ".join(sys.argv[1:])))
