"""Text to ids and back, chat templates, and what a broken checkpoint or conversation gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from rank_driver import DATA, demo_model
from tokenizers.pre_tokenizers import ByteLevel

from batchtp.errors import CheckpointError, RequestError, TokenizerError
from batchtp.worker.tokenizer import IncrementalDecoder, Tokenizer

LLAMA, QWEN = DATA / "awq-g32-zero-range", DATA / "awq-g64"
HI = [{"role": "user", "content": "hi"}]
TEXTS = ["Hello wörld", "1234 don't 'LL", "🦜🏽 你好\n\n\tx  ", "a\x00b", "e\u0301"]


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return Tokenizer.from_path(LLAMA)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_path(demo_model())


def changed(tmp_path: Path, base: Path = LLAMA, **config: Any) -> Path:
    """A copy of a tokenizer with its tokenizer_config.json changed; None takes a key away."""
    path = tmp_path / "model"
    shutil.copytree(base, path, ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    file = path / "tokenizer_config.json"
    merged = json.loads(file.read_text()) | config
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(llama: Tokenizer, text: str) -> None:
    ids = llama.encode_prompt(text)
    assert ids[0] == 0
    assert llama.decode(ids) == text


def test_a_prompt_gets_the_tokens_that_its_own_tokenizer_adds(tmp_path: Path) -> None:
    plain = Tokenizer.from_path(QWEN).encode_prompt("hi")
    assert 0 not in plain
    with_bos = changed(tmp_path, QWEN, add_bos_token=True, bos_token="<|endoftext|>")
    assert Tokenizer.from_path(with_bos).encode_prompt("hi") == [0, *plain]


def test_the_config_may_take_the_first_token_away(tmp_path: Path, llama: Tokenizer) -> None:
    without = Tokenizer.from_path(changed(tmp_path, add_bos_token=False))
    assert without.encode_prompt("hi") == llama.encode_prompt("hi")[1:]


def test_a_long_prompt_is_never_cut(tmp_path: Path) -> None:
    path = changed(tmp_path)
    file = path / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(whole))
    assert len(Tokenizer.from_path(path).encode_prompt("x y z " * 50)) > 100


def test_a_prompt_that_is_not_unicode_fails_by_itself(llama: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        llama.encode_prompt("a\ud800")
    assert caught.value.code == "invalid_prompt"


def test_chat_renders_the_template_and_adds_no_second_bos(llama: Tokenizer) -> None:
    ids = llama.encode_chat(HI)
    shown = llama.backend.decode(ids, skip_special_tokens=False)
    assert shown == "<s><|user|>\nhi</s>\n<|assistant|>\n"
    assert ids.count(0) == 1


def test_the_template_file_goes_before_the_config(tmp_path: Path) -> None:
    path = changed(tmp_path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!{{ eos_token }}")
    assert rendered(path) == "hi!</s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert rendered(changed(tmp_path, chat_template=templates)) == "yes"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}",
            "U\n",
        ),
        ("{% generation %}G{% endgeneration %}", "G"),
        ("{% for m in messages %}{% continue %}{% endfor %}N", "N"),
        ("{{ add_generation_prompt }} {{ tools is none }}", "True True"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_may_use(tmp_path: Path, template: str, text: str) -> None:
    assert rendered(changed(tmp_path, chat_template=template)) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 'a' + messages[0].missing }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_fails_one_row(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_path(changed(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(HI)
    assert caught.value.code == "chat_template_error"
    assert caught.value.param == "messages"


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    path = changed(tmp_path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    file = path / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}
    file.write_text(json.dumps(kept))
    tokenizer = Tokenizer.from_path(path)
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(HI)
    assert caught.value.code == "no_chat_template"
    assert tokenizer.encode_prompt("hi")


def test_a_malformed_template_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="malformed"):
        Tokenizer.from_path(changed(tmp_path, chat_template="{% if %}"))


def test_missing_and_corrupt_tokenizers_are_named(tmp_path: Path) -> None:
    path = changed(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_path(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_path(path)


@pytest.mark.parametrize("wrong", ["x", [[1]], {"a": 1}, float("inf")])
def test_a_malformed_end_token_is_named(tmp_path: Path, wrong: Any) -> None:
    path = changed(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=r"end-of-sequence token .* is malformed"):
        Tokenizer.from_path(path)


def test_eos_ids_are_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    path = changed(tmp_path, eos_token="<pad>")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert Tokenizer.from_path(path).eos_token_ids == {1, 2, 5, 7}


def test_special_tokens_are_left_out_and_unknown_ids_are_nothing(llama: Tokenizer) -> None:
    ids = llama.encode_prompt("hi")
    assert llama.decode([*ids, 1, 2, 390]) == "hi"


# A replacement character of the text's own is held back like half of one.
@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_pieces_are_whole_characters_and_add_up(llama: Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(llama)
    ids = llama.encode_prompt(text)
    assert "".join(decoder.push(token) for token in ids) == llama.decode(ids)


def test_a_character_in_parts_comes_at_once(llama: Tokenizer) -> None:
    ids = llama.encode_prompt("🦜")[1:]
    assert len(ids) == 4
    decoder = IncrementalDecoder(llama)
    assert [decoder.push(token) for token in ids] == ["", "", "", "🦜"]


def test_bytes_that_are_no_text_do_not_hold_text_back_for_ever(llama: Tokenizer) -> None:
    broken = llama.encode_prompt("🦜")[1]
    decoder = IncrementalDecoder(llama)
    shown = "".join(decoder.push(broken) for _ in range(40))
    assert len(shown) >= 16
    assert llama.decode([broken]) == "\ufffd"


def rendered(path: Path) -> str:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer.template is not None
    return tokenizer.template.render(HI)


def test_the_demo_tokenizes_as_transformers_does(demo: Tokenizer) -> None:
    cases = json.loads((DATA.parent / "demo_greedy.json").read_text())["cases"]
    for case in cases:
        shown = demo.backend.decode(case["prompt_ids"], skip_special_tokens=False)
        question = shown.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": question}]
        assert demo.encode_chat(messages) == case["prompt_ids"]
        assert demo.decode(case["greedy_ids"]) == case["text"]
    assert demo.eos_token_ids == {2}
    assert demo.encode_prompt("12") == [*demo.encode_prompt("1"), *demo.encode_prompt("2")]


def bpe_keys(**changes: Any) -> dict[str, Any]:
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *letters, "hi", "12", "123"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *([1] * (len(tokens) - 2))],
        "tokenizer.ggml.merges": ["h i", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


def bpe(tmp_path: Path, **changes: Any) -> Tokenizer:
    write_gguf(tmp_path / "model.gguf", bpe_keys(**changes), {})
    return Tokenizer.from_path(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("pre", "bos", "tokens"),
    [
        ("llama-bpe", True, ["123", "1"]),
        ("qwen2", False, ["1", "2", "3", "1"]),
        ("smollm", False, ["1", "2", "3", "1"]),
        ("gpt-2", False, ["123", "1"]),
    ],
)
def test_gguf_families_split_each_in_its_way(
    tmp_path: Path, pre: str, bos: bool, tokens: list[str]
) -> None:
    tokenizer = bpe(tmp_path, **{"tokenizer.ggml.pre": pre})
    ids = tokenizer.encode_prompt("1231")
    assert (ids[0] == 0) == bos
    assert [tokenizer.backend.id_to_token(token) for token in ids[bos:]] == tokens
    assert tokenizer.decode(ids) == "1231"


def test_gguf_special_tokens_are_one_token(tmp_path: Path) -> None:
    tokenizer = bpe(tmp_path)
    assert tokenizer.encode_prompt("hi</s>")[-1] == 1
    assert tokenizer.vocab_size == 2 + 256 + 3


def test_gguf_ids_of_another_kind_are_named(tmp_path: Path) -> None:
    for key in ("bos", "eos", "eot", "unknown"):
        name = f"tokenizer.ggml.{key}_token_id"
        with pytest.raises(CheckpointError, match=rf"key {name} is 1\.5"):
            bpe(tmp_path, **{name: 1.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "splitting 'tekken' is not supported"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "not of its tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "the same token twice"),
        ({"tokenizer.ggml.token_type": 1}, "token_type is not a list"),
        ({"tokenizer.ggml.bos_token_id": 999}, "999, is not in its vocabulary"),
        ({"tokenizer.ggml.merges": [1]}, r"no list of tokenizer\.ggml\.merges"),
    ],
)
def test_gguf_tokenizers_that_are_not_built_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        bpe(tmp_path, **changes)
