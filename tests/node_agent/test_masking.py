"""What leaves the node of command lines, environments and texts."""

from __future__ import annotations

import json

from surgeon.node.agent import masking

SECRET = "sk-1234567890"  # noqa: S105 - not one


def test_keys_on_a_command_line_are_masked_in_both_spellings() -> None:
    """`--api-key X` and `--api-key=X`, the admin's too; what merely sounds alike is shown."""
    words = ["--api-key", SECRET, f"--admin-api-key={SECRET}", "--tokenizer-path", "/t", "--max-total-tokens", "20"]
    shown = masking.argv(words)
    assert SECRET not in " ".join(shown)
    assert shown[-4:] == words[-4:]
    assert shown[:3] == ["--api-key", "****", "--admin-api-key=****"]


def test_an_option_after_a_valueless_secret_option_is_shown() -> None:
    """A missing value must not swallow the next option."""
    assert masking.argv(["--api-key", "--port", "1"]) == ["--api-key", "--port", "1"]


def test_only_the_telling_part_of_an_environment_leaves() -> None:
    """Import paths and settings of sglang, CUDA and NCCL; never a token, not even a known one."""
    variables = {
        "SGLANG_OEA_K0": "4",
        "PYTHONPATH": "/p",
        "HF_TOKEN": SECRET,
        "SGLANG_ADMIN_PASSWORD": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "MAIL": "me",
        "https_proxy": f"http://me:{SECRET}@proxy:3128",
    }
    shown = masking.environ(variables)
    assert SECRET not in json.dumps(shown)
    assert shown["SGLANG_OEA_K0"] == "4"
    assert shown["PYTHONPATH"] == "/p"
    assert shown["https_proxy"] == "http://****@proxy:3128"
    assert "MAIL" not in shown
    assert "AWS_SECRET_ACCESS_KEY" not in shown


def test_a_log_loses_the_servers_own_secrets_and_printed_keys() -> None:
    """The server prints its arguments at start; values known from the launch go wherever they stand."""
    values = masking.secrets(["--api-key", SECRET], {"MY_TOKEN": "tok-abcdef"})
    text = f"api_key='other-key', port=1 url http://a:b@h/ {SECRET} tok-abcdef"
    shown = masking.text(text, values)
    assert shown == "api_key='****', port=1 url http://****@h/ **** ****"


def test_masking_leaves_json_readable() -> None:
    """The server's arguments come as JSON and are parsed after masking."""
    said = json.loads(masking.text(json.dumps({"api_key": SECRET, "pad_token": "<pad>", "tp_size": 8, "x": None})))
    assert said == {"api_key": "****", "pad_token": "<pad>", "tp_size": 8, "x": None}


def test_short_values_do_not_mask_ordinary_words() -> None:
    """A key of one letter would blank a whole log."""
    assert masking.secrets(["--api-key", "a"], {"A_KEY": ""}) == set()
