"""Queries a server with the unmodified clients of LangChain and LiteLLM: python other_clients.py URL KEY PROMPT.

The program prints JSON with the text of each answer by the name of the call. It runs in a separate environment.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it, the import uses the network

import litellm
from langchain_openai import ChatOpenAI, OpenAI


def langchain(url: str, key: str, prompt: str) -> dict[str, str]:
    """The answers by LangChain's classes."""
    given: Any = {"base_url": url, "api_key": key, "model": "tiny", "max_retries": 0}
    chat, plain = ChatOpenAI(**given, temperature=0), OpenAI(**given, temperature=0)
    responses = ChatOpenAI(**given, use_responses_api=True)
    turns = [("system", "be brief"), ("human", prompt)]
    return {
        "langchain chat": chat.invoke(turns).text,
        "langchain chat stream": "".join(chunk.text for chunk in chat.stream(turns)),
        "langchain completion": plain.invoke(prompt),
        "langchain completion stream": "".join(plain.stream(prompt)),
        "langchain response": responses.invoke(turns).text,
        "langchain response stream": "".join(chunk.text for chunk in responses.stream(turns)),
    }


def lite(url: str, key: str, prompt: str) -> dict[str, str]:
    """The answers by LiteLLM's functions."""
    given: Any = {"api_base": url, "api_key": key, "max_retries": 0}
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}]
    chat: Any = {"model": "openai/tiny", "messages": turns, **given}
    plain: Any = {"model": "text-completion-openai/tiny", "prompt": prompt, **given}
    response: Any = {"model": "openai/tiny", "input": prompt, **given}

    def joined(texts: Iterable[str | None]) -> str:
        return "".join(text or "" for text in texts)

    return {
        "litellm chat": litellm.completion(**chat).choices[0].message.content,
        "litellm chat stream": joined(c.choices[0].delta.content for c in litellm.completion(**chat, stream=True)),
        "litellm completion": litellm.text_completion(**plain).choices[0].text,
        "litellm completion stream": joined(c.choices[0].text for c in litellm.text_completion(**plain, stream=True)),
        "litellm response": litellm.responses(**response).output_text,
        "litellm response stream": joined(
            event.delta
            for event in litellm.responses(**response, stream=True)
            if event.type == "response.output_text.delta"
        ),
    }


if __name__ == "__main__":
    print(json.dumps(langchain(*sys.argv[1:]) | lite(*sys.argv[1:])))
