"""A user's message -> token ids of a prompt, by the model's chat template.  What cannot become a prompt is named."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from conf.data import DataConfig
from tlt_core.data.question import DataError

MESSAGES = "prompt_messages"  # in a question's metadata: the whole conversation, which ends with the question
_NO_VARIABLES: Mapping[str, Any] = {}
_REPLY = "TLT-reply"  # stands for a response whose tokens are known


def encode_prompt(
    tokenizer: Any,
    text: str,
    *,
    system_prompt: str | None,
    before: Sequence[Mapping[str, str]] = (),
    template_kwargs: Mapping[str, Any] = _NO_VARIABLES,
) -> list[int]:
    """Token ids of a user's message, ready for the answer.  Raises DataError where the chat template refuses it.

    system_prompt: None leaves the system message to the chat template, as chat calls of serving engines do.  before:
    earlier messages, of which a system message goes before `system_prompt`.  Without a chat template the texts are
    encoded as they are.  template_kwargs: variables of the template, see `check_variables`.
    """
    has_system = any(message["role"] == "system" for message in before)
    system = [] if system_prompt is None or has_system else [{"role": "system", "content": system_prompt}]
    messages = [*system, *before, {"role": "user", "content": text}]
    if not tokenizer.chat_template:
        return tokenizer.encode("".join(f"{message['content']}\n" for message in messages if message["content"]))
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **dict(template_kwargs)
        )
    except (TemplateError, TypeError) as error:  # TypeError: it computes with a variable of another kind
        remedies = ["edit the model's chat_template.jinja"]
        if template_kwargs:
            remedies.insert(0, f"mend data.chat_template_kwargs={dict(template_kwargs)}")
        if system_prompt is not None:
            remedies.insert(0, "leave data.system_prompt (--system-prompt) out and put its text into data.instruction")
        told = "a user's message" if system_prompt is None else "a system message before the user's"
        raise DataError(f"the model's chat template fails on {told} ({error}): {', or '.join(remedies)}") from None


def encode_turn(tokenizer: Any, message: str, *, ended_by: int, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids between a response and the next one: what the chat template says after a response, `message` as the
    user's, and the beginning of the next response.  ended_by: the response's last token, which may be a part of it.

    Raises DataError where the chat template has no such conversation.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode(f"\n{message}\n", add_special_tokens=False))
    roles = ("user", "assistant", "user")
    talk = [{"role": role, "content": text} for role, text in zip(roles, (_REPLY, _REPLY, message), strict=True)]
    try:
        said = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **dict(template_kwargs))
    except (TemplateError, TypeError) as error:
        said, problem = "", f" ({error})"
    else:
        problem = ""
    *before, after = said.split(_REPLY, 2)
    if len(before) != 2 or not after:
        raise DataError(
            f"the model's chat template does not render a user's message after a response{problem}, so there can be no "
            "turns: edit the model's chat_template.jinja, or leave rollout.environment out"
        )
    return list(tokenizer.encode(after.removeprefix(tokenizer.decode([ended_by])), add_special_tokens=False))


def encode_question(
    tokenizer: Any, question: str, cfg: DataConfig, metadata: Mapping[str, Any] = _NO_VARIABLES
) -> list[int]:
    """Token ids of a question's prompt, as a data set's configuration wants it.  Raises DataError.

    metadata: the question's, whose `MESSAGES` come before it."""
    return encode_prompt(
        tokenizer,
        question + cfg.instruction,
        system_prompt=cfg.system_prompt,
        before=metadata.get(MESSAGES, ())[:-1],
        template_kwargs=cfg.chat_template_kwargs,
    )


def check_variables(tokenizer: Any, template_kwargs: Mapping[str, Any], *, setting: str) -> None:
    """Raises DataError for variables that the chat template does not read.  setting: where they were given."""
    if not template_kwargs:
        return
    if not tokenizer.chat_template:
        raise DataError(f"{setting}={dict(template_kwargs)}: the model has no chat template; leave {setting} out")
    options = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
    template = tokenizer.get_chat_template()
    for name in template_kwargs:
        if name in options or not re.search(rf"\b{re.escape(name)}\b", template):
            raise DataError(
                f"{setting}: {name!r} is no variable of the model's chat template, so it would have no effect; leave "
                "it out, or see chat_template.jinja (or tokenizer_config.json) for the names there are"
            )


def require_embedded(tokens: Sequence[int], tokenizer: Any, *, vocab_size: int, where: str) -> None:
    """Raises DataError for a token that the tokenizer has and the model's embedding has not.

    where: file and line, or so.
    """
    beyond = max(tokens, default=0)
    if beyond >= vocab_size:
        raise DataError(
            f"{where}: the tokenizer has {tokenizer.convert_ids_to_tokens(beyond)!r} as token {beyond}, but the "
            f"model's embedding ends at {vocab_size - 1}: the token was added to the tokenizer alone.  Enlarge the "
            "embedding (transformers: model.resize_token_embeddings(len(tokenizer))) and save the model, or remove "
            "the token from the tokenizer"
        )
