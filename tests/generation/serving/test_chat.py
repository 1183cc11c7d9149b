"""Templates of chats: those of models' folders, as `transformers` renders them."""

import json
from datetime import datetime

import pytest

from meshdsl.generation.serving.chat import (
    Unfit,
    identity,
    load_template,
    stop_tokens_of,
    template_beside,
)
from meshdsl.training.data.tokenizers import Bytes

# As Qwen's and Llama's folders have them, without the parts for tools.
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""
TALK = [
    {"role": "user", "content": " Hi <b>&</b> "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def folder_of(path, **configuration):
    (path / "tokenizer_config.json").write_text(json.dumps(configuration))
    return path / "tokenizer.json"


def test_the_template_of_a_folder_makes_the_text(tmp_path):
    tokenizer = folder_of(tmp_path, chat_template=CHATML)
    template = load_template(template_beside(tokenizer))
    assert template(TALK[:1]) == (
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n Hi <b>&</b> <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_file_of_its_own_goes_first_and_has_the_special_tokens(tmp_path):
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    tokenizer = folder_of(tmp_path, chat_template=CHATML, **tokens)
    (tmp_path / "chat_template.jinja").write_text(INST)
    template = load_template(template_beside(tokenizer))
    assert template(TALK) == "<s> [INST] Hi <b>&</b> [/INST] Hello</s> [INST] Bye [/INST]"
    with pytest.raises(Unfit, match="roles must take turns"):
        template(TALK[1:])


def test_of_several_templates_the_default_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder_of(tmp_path, chat_template=several)
    assert load_template(tmp_path / "tokenizer_config.json")(TALK) == "yes"


def test_a_template_may_ask_whether_tools_are_none(tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% if tools is not none or documents is not none %}tools{% else %}none{% endif %}"
    )
    assert load_template(tmp_path / "chat.jinja")(TALK[:1]) == "none"


def test_json_in_a_template_may_be_ascii(tmp_path):
    (tmp_path / "chat.jinja").write_text('{{ "é" | tojson }}{{ "é" | tojson(ensure_ascii=true) }}')
    assert load_template(tmp_path / "chat.jinja")(TALK[:1]) == '"é""\\u00e9"'


def test_the_names_of_transformers_are_there(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages | tojson }}{{ strftime_now('%%') }}{{ none_given is defined }}")
    assert load_template(file)(TALK[1:2]) == json.dumps(TALK[1:2]) + "%False"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% include 'tokenizer_config.json' %}",
        "{{ messages[0].content / 0 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(tmp_path, text):
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    with pytest.raises(Unfit):
        load_template(file)(TALK)
    assert len(TALK) == 3


def test_the_tokens_that_end_an_answer_are_those_of_the_folder(tmp_path):
    assert stop_tokens_of(Bytes(), tmp_path / "tokenizer.json") == frozenset()
    tokenizer = folder_of(tmp_path, eos_token="}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert stop_tokens_of(Bytes(), tokenizer) == {5, 7, ord("}")}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    folder_of(tmp_path, eos_token=None)
    assert stop_tokens_of(Bytes(), tokenizer) == {5}


def test_mistakes_have_messages(tmp_path):
    def message(path):
        with pytest.raises(ValueError) as error:
            load_template(path)
        return str(error.value)

    assert "No such file" in message(tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    assert "bad.jinja is no template of Jinja: " in message(tmp_path / "bad.jinja")
    folder_of(tmp_path, eos_token="}")
    assert "tokenizer_config.json has no chat_template" in message(
        tmp_path / "tokenizer_config.json"
    )
    assert template_beside(tmp_path / "tokenizer.json") is None


def test_the_date_of_a_template_may_be_given_and_special_tokens_tell_templates_apart(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ strftime_now('%d %b %Y') }}{{ eos_token }}")
    folder = tmp_path / "tokenizer_config.json"
    folder.write_text(json.dumps({"eos_token": "<a>"}))
    before = identity(file)
    assert load_template(file, datetime(2024, 7, 26))(TALK) == "26 Jul 2024<a>"
    folder.write_text(json.dumps({"eos_token": "<b>"}))
    assert identity(file) != before
