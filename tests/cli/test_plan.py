"""`jshadow plan` and `jshadow policies` as a user calls them: a lone config.json, tables, --json, typed errors."""

import dataclasses
import json

import pytest
from real_shapes import LLAMA_31_8B_JSON

from jshadow.cli.policies import attribute_texts, setting_rows
from jshadow.planner.gpu_specs import DEFAULT_GPUS
from jshadow.policies import POLICIES, ShadowKV
from jshadow.policies.settings import setting_types


@pytest.fixture
def config(tmp_path):
    """A config.json with nothing beside it."""
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    return str(tmp_path / "llama.json")


@pytest.fixture
def plans(config, answer):
    return lambda *options: answer("plan", config, *options)["plans"]


@pytest.fixture
def table(config, printed):
    """What `jshadow plan` prints, in one line."""
    return lambda *options: " ".join(printed("plan", config, *options).split())


H200 = ["--context", "8192", "--gpu", "h200"]


def test_a_config_alone_is_planned_on_the_default_gpus(plans):
    made = plans("--context", "122880", "--fetch", "device_put")
    assert [plan["gpu"]["name"] for plan in made] == list(DEFAULT_GPUS)
    assert [plan["full"]["largest_batch"] for plan in made] == [4, 4, 8]
    for plan in made:
        chosen, packed, small = plan["chosen"], plan["beside"]["packed"], plan["beside"]["packed_small"]
        assert plan["capacity"] == 122880 + 64
        assert (chosen["policy"]["name"], chosen["policy"]["rank"]) == ("shadowkv", 160)
        assert chosen["largest_batch"] >= 6 * plan["full"]["largest_batch"]
        assert {"weights", "left", "right", "landmarks", "outliers", "window"} <= chosen["step"]["hbm_bytes"].keys()
        assert chosen["step"]["pcie_bytes"] > 0
        assert [side["policy"]["keys.profile"] for side in (packed, small)] == [[144, 224, 0], [16, 224, 192]]
        for side in (packed, small):
            assert (side["policy"]["choice.outlier_rule"], side["policy"]["keys.weights"]) == ("both", "queries")
        # per key column: means have 4 / 8 bits more; scales and spreads of 16 bits come on top
        pair = [side["row_parts"]["left"][0] + side["row_parts"]["landmarks"][0] for side in (packed, chosen)]
        assert pair[1] < pair[0] < 1.02 * pair[1]
        assert packed["row_host_bytes"] == small["row_host_bytes"]
        assert packed["row_host_bytes"] * 64 == chosen["row_host_bytes"] * 17
        assert small["largest_batch"] > 1.9 * chosen["largest_batch"]
        ratio = chosen["step"]["tokens_per_second"] / plan["full"]["step"]["tokens_per_second"]
        assert plan["ratio"] == pytest.approx(ratio)


def test_packed_codes_stand_beside_the_paper_s(plans, table):
    """At equal bytes whatever the rank, in tables and at several lengths; beside no other policy or code."""
    [plan] = plans(*H200, "--set", "rank=96", "--host-gib", "4", "--fetch", "device_put")
    packed = plan["beside"]["packed"]
    assert packed["row_parts"]["left"][0] * 192 == plan["chosen"]["row_parts"]["left"][0] * 128
    assert plan["host_limit"] == 4 * 2**30 >= plan["chosen"]["host_bytes"]
    assert packed["batch"] * packed["row_host_bytes"] == packed["host_bytes"] <= 4 * 2**30
    assert table(*H200).count("packed_small") == 3  # in two tables, and in a sentence on its fetch mode
    for row in plans("--lengths", "4096,8192"):
        assert row["beside"]["packed_small"]["device_bytes"] < row["beside"]["packed"]["device_bytes"]
        assert row["beside"]["packed"]["host_bytes"] * 64 == row["host_bytes"] * 17
    assert "full / packed_small" in table("--lengths", "4096")
    for other in (["--policy", "quest"], ["--set", "keys=exact"], ["--set", "chunk_size=5"]):
        assert [row["beside"] for row in plans("--lengths", "4096", *other)] == [{}]


@pytest.mark.parametrize(("told", "there"), [("", {"packed", "packed_small"}), ("keys='transform'", set())])
def test_what_no_kernel_can_fetch_is_not_planned(plans, monkeypatch, told, there):
    """Beside the chosen policy, which would be refused."""
    layout = ShadowKV.host_layout

    def changed(policy, spec):
        return dataclasses.replace(layout(policy, spec), no_kernel=told if policy.keys.name == "transform" else "")

    monkeypatch.setattr(ShadowKV, "host_layout", changed)
    [plan] = plans(*H200, "--fetch", "zero_copy")
    assert plan["beside"].keys() == there


def test_bytes_of_packed_codes(config, answer):
    """`jshadow policies`: a token's key code and landmarks, and a quarter of the host's bytes and of what moves."""
    told = answer("policies", "--model", config, "--context", "131072")["policies"]
    rows = {row["setting"]: row for row in told if "budget=2048" in row["setting"]}
    paper, tokens = rows.pop("shadowkv:rank=160:budget=2048"), 32 * 8 * 16380
    found = [row for setting, row in rows.items() if "transform" in setting]
    for row, *bytes_each in zip(found, (256, 176), (328, 66), (10, 2), strict=True):
        parts = [row["parts"][part][0] for part in ("left", "landmarks", "spread")]
        assert parts == [each * tokens for each in bytes_each]
        assert [row[name] * 64 for name in ("bytes_host", "bytes_moved")] == [
            paper[name] * 17 for name in ("bytes_host", "bytes_moved")
        ]


def test_long_settings_are_told_whole(config, printed):
    long = "shadowkv:keys=transform:landmarks.dtype=int4:values.dtype=int4:keys.bits=1.333:chunk_size=8:budget=2048"
    lines = printed("policies", "--model", config, "--context", "8192", "--policies", long).splitlines()
    assert "".join(line.split("│")[1].strip() for line in lines if line.startswith("│")) == long


def test_a_directory_means_the_same(plans, answer, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    options = (
        "--context",
        "4096",
        "--gpu",
        "h200",
        "--tp",
        "2",
        "--left",
        "everywhere",
        "--batch",
        "3",
        "--fetch",
        "resident",
    )
    [plan] = plans(*options)
    assert [plan] == answer("plan", tmp_path / "model", *options)["plans"]
    assert (plan["count"], plan["chosen"]["batch"], plan["fetch"]) == (2, 3, "resident")
    assert plan["chosen"]["host_bytes"] == plan["chosen"]["step"]["pcie_bytes"] == 0


def test_auto_is_the_fastest_mode(plans, table):
    """It is the default, each policy has its own, and the table and JSON say why."""
    options = ("--context", "122880", "--gpu", "h200", "--host-gib", "128", "--batch", "37")
    [plan] = plans(*options)
    assert [plan] == plans(*options, "--fetch", "auto")
    assert (plan["fetch"], plan["gather_bytes_per_second"]) == ("auto", 20e9)
    sides = [plan["chosen"], plan["beside"]["packed"], plan["beside"]["packed_small"], plan["full"]]
    assert [side["fetch"] for side in sides[1:]] == ["zero_copy", "resident", "resident"]
    assert [side["repeat_share"] for side in sides[1:]] == [0.6, 0.6, 0]
    assert sides[2]["fetch_reason"].startswith("resident: 37 requests fit into 137.5 of 139.8 GiB of device memory")
    assert "no mode fits" in sides[0]["fetch_reason"]
    assert all(side["fetch_reason"] for side in sides)
    out = table(*options)
    assert f"h200, shadowkv packed_small, {sides[2]['fetch_reason']}." in out
    assert "│ fetch │ device_put │ zero_copy │ resident │ resident │" in out
    assert "│ kept from the last step │ 0% │ 60% │ 60% │ 0% │" in out


def test_a_gather_slower_than_the_link_is_told(plans, table):
    options = (*H200, "--fetch", "device_put")
    told = "device_put cannot reach PCIe on h200: the host gathers {} GB/s (--gather), and PCIe moves 63 GB/s."
    assert told.format("20") in table(*options)
    assert told.format("62.5") in table(*options, "--gather", "62.5")
    assert "cannot reach" not in table(*options, "--gather", "63")
    [plan] = plans(*options, "--gather", "10")
    assert plan["chosen"]["step"]["gather_seconds"] == plan["chosen"]["step"]["pcie_bytes"] / 10e9


TABLES = [
    (
        ["--context", "122880", "--gpu", "a100-80gb", "--fetch", "device_put"],
        {"largest batch", "prefilled in one call", "HBM, landmarks, GB", "HBM, scores, GB", "HBM, cache, GB"}
        | {"PCIe, GB", "host gather, ms", "tokens/s, predicted", "tokens/s, at most", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
        | {"2,039 GB/s HBM, 31.5 GB/s PCIe", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"},
    ),
    (["--context", "122880", "--gpu", "h100", "--policy", "full", "--batch", "5"], {"5 (no fit)"}),
    (["--context", "8", "--gpu", "h100", "--set", "rank=8"], {"nothing to select"}),
]


@pytest.mark.parametrize(("options", "told"), TABLES)
def test_tables_say_what_they_stand_on_and_what_does_not_fit(table, options, told):
    out = table(*options)
    assert [words for words in told if words not in out] == []
    assert "nan" not in out


def test_a_room_changes_the_window_alone(plans):
    """The window of a prompt of any length has space for the new tokens, both by length and on a GPU."""
    new = ("--max-new-tokens", "2048", "--fetch", "device_put")
    [usual] = plans("--lengths", "8192", *new)
    [less] = plans("--lengths", "8192", "--room", "1024", *new)
    token, left = 2 * 32 * 1024 * 2, 7  # a chunk that a prompt leaves unfinished
    assert usual["full_bytes"] == (8192 + 2048) * token
    assert usual["parts"]["window"][0] - less["parts"]["window"][0] == (1024 - left) * token
    assert {**usual["parts"], "window": 0} == {**less["parts"], "window": 0}
    [plan] = plans(*H200, "--room", "1024", *new)
    assert plan["chosen"]["row_parts"] == {name: list(size) for name, size in less["parts"].items()}


def test_sessions_over_shared_documents(config, answer, table):
    """As a table and as JSON: a prompt half of its own for each session, or one for each document."""
    options = ["--context", "122880", "--room", "1024", "--gpu", "h200", "--host-gib", "128"]
    [made] = answer("plan", config, *options, "--shared", "30", "--fetch", "device_put")["sessions"]
    assert made["gpu"] == "h200"
    assert list(made["plans"]) == ["shadowkv", "shadowkv packed", "shadowkv packed_small", "full"]
    shared = made["plans"]["shadowkv packed_small"]
    assert shared["fits"]
    assert shared["host_bytes"] <= shared["limits"]["host"] == 128 * 2**30
    [one] = shared["classes"]
    assert one["sessions_any_spread"] >= 300
    assert one["group_rows"] == 8
    assert one["documents_bytes"][1] == 30 * sum(host for _, host in one["prompt_parts"].values())
    parts = (shared["weights_bytes"], one["state_bytes"][0], shared["temporaries_bytes"], shared["prefill_bytes"][0])
    assert shared["device_bytes"] == sum(parts) + shared["limits"]["reserve"]
    out = table(*options, "--group-rows", "2", "--policy", "full")
    for told in ("h200, 122,880 + 1,024 tokens", "sessions", "groups of 2 rows", "of 128.00", "Not counted"):
        assert told in out
    assert "documents" not in out


GPU = ["--context", "4096", "--gpu", "h100"]
NEED_A_CONTEXT = ("repeat-share", "gather", "host-gib", "shared")
BAD = [
    ([*GPU, "--tp", "3"], "ConfigError: tp must divide the 8 KV heads, got tp=3"),
    ([*GPU, "--batch", "-1"], "ConfigError: batch must be at least 1"),
    (["--context", "131072"], "CapacityError: context + max_new_tokens"),
    (["--gpu", "h100"], "ConfigError: --gpu must come with --context"),
    *(([f"--{name}", "1"], f"ConfigError: --{name} must come with --context") for name in NEED_A_CONTEXT),
    ([*GPU, "--lengths", "5"], "ConfigError: --lengths must be left out"),
    (["--lengths", "4,x"], "ConfigError: --lengths must be a comma list"),
    ([*GPU, "--host-gib", "0"], "ConfigError: --host-gib must be above 0"),
    ([*GPU, "--gather", "-1"], "ConfigError: --gather must be above 0"),
    ([*GPU, "--set", "keys=exact", "--fetch", "zero_copy"], "fetch must be 'device_put' or 'resident'"),
    ([*GPU, "--repeat-share", "0.6", "--fetch", "device_put"], "ConfigError: repeat_share must be 0"),
    ([*GPU, "--policy", "magic"], "ConfigError: policy must be one of"),
    ([*GPU, "--set", "rank=9999"], "ConfigError: shadowkv.rank"),
    ([*GPU, "--dtype", "int3"], "ConfigError: dtype must be one of"),
    ([*GPU, "--fetch", "mail"], "ConfigError: fetch must be"),
    ([*GPU, "--room", "-1"], "CapacityError: room must be an integer of at least 0, or None, got -1"),
    ([*GPU, "--shared", "0"], "ConfigError: --shared must be at least 1, got 0"),
    ([*GPU, "--shared", "2", "--fetch", "mail"], "ConfigError: fetch must be"),
    ([*GPU, "--shared", "2", "--batch", "3"], "ConfigError: --batch must be left out with --shared"),
    ([*GPU, "--group-rows", "0"], "ConfigError: group_rows must be at least 1, got 0"),
    ([*GPU, "--shared", "2", "--room", "130000"], "CapacityError: prompt must be at least 1"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_bad_options_are_told_on_stderr_alone(config, options, told, refused):
    refused(told, "plan", config, *options, "--json")


BAD_CONFIGS = {"none.json": None, "none/config.json": None, "list.json": "[]", "torn.json": '{"model_type"'}
BAD_CONFIGS |= {"other.json": '{"model_type": "magic"}'}
BAD_CONFIGS |= {"odd.json": json.dumps(LLAMA_31_8B_JSON | {"hidden_size": "wide"})}


@pytest.mark.parametrize(("name", "text"), BAD_CONFIGS.items(), ids=BAD_CONFIGS)
def test_a_bad_config_is_told(name, text, refused, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert refused("Error", "plan", tmp_path / name, *GPU).startswith("jshadow: C")


def test_each_setting_has_its_type_default_and_text(answer, printed):
    quest = answer("policies", "quest")
    assert (quest["name"], quest["paper"]) == ("quest", "arXiv 2406.10774, section 3")
    rows = {row["name"]: row for row in quest["settings"]}
    assert (rows["unit"]["type"], rows["unit"]["default"], rows["top_p"]["default"]) == ("int", 16, 1.0)
    assert "tokens" in rows["budget"]["text"]
    assert "unit: int = 16" in printed("policies", "quest")


def test_a_setting_of_a_record_names_what_chooses_it():
    rows = setting_rows(POLICIES["shadowkv"]())
    names = ("keys.bits", "keys", "landmarks.tokens")
    bits, keys, tokens = ([row for row in rows if row["name"] == name] for name in names)
    assert [row["with"] for row in bits][:1] == ["keys=transform"]  # the codes of a plugin follow, if it is imported
    [row] = keys
    assert (row["type"].startswith("lowrank or transform or exact"), row["default"]) == (True, "lowrank")
    assert [(row["with"], row["default"]) for row in tokens] == [("", None)]


@pytest.mark.parametrize("name", POLICIES)
def test_no_setting_is_without_a_text(name):
    rows = setting_rows(POLICIES[name]())
    assert {row["name"] for row in rows} == set(setting_types(POLICIES[name]))
    assert [row["name"] for row in rows if not row["text"]] == []
    json.dumps(rows)


def test_texts_of_bases_and_of_several_attributes():
    @dataclasses.dataclass
    class Base:
        """A base.

        Attributes:
            one, two: both of them,
                in two lines.
            three: of the base.

        More text: not an attribute.
        """

    @dataclasses.dataclass
    class Other(Base):
        """Another one.

        Attributes:
            three: its own.
        """

    both = "both of them, in two lines."
    assert attribute_texts(Other) == {"one": both, "two": both, "three": "its own."}


def test_an_unknown_policy_or_another_option_is_told(refused):
    refused("policy must be one of", "policies", "magic")
    refused("--context must be left out", "policies", "quest", "--context", "5")
