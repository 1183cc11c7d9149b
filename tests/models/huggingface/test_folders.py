"""Folders of Hugging Face as models: settings, round trips, layouts, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import meshdsl as md
from meshdsl import models
from meshdsl.models.huggingface import Folder, family_for
from meshdsl.training.checkpointing.weights import Weights, load_weights
from meshdsl.training.state import by_path, spec_of
from tests.models.huggingface.folders import (
    CONFIGS,
    scores_of,
    tensors_of,
    write_back,
    write_folder,
)

LAYOUTS = (
    "batch:data",
    "heads:model; d_ff:model; vocab:model",
    "params/embed:data; heads:model; batch:data",
)


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_go_in_and_out_bit_for_bit(case, dtype, tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS[case], files=3, dtype=dtype)
    model = models.load(str(folder), f"policy={dtype}")
    params = load_weights(folder, spec_of(model.init))
    out = write_back(tmp_path / "out", model, params, folder, most=20_000)
    before, after = tensors_of(folder), tensors_of(out)
    assert {*before} == {*after} and len(list(out.glob("*.safetensors"))) > 1
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes() and array.dtype == after[name].dtype, name
    assert Folder.read(out).model.config == Folder.read(folder).model.config


@pytest.mark.parametrize("case", CONFIGS)
def test_every_layout_gives_the_same_scores(case, tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS[case])
    # In float32, rounding alone moves scores by 2e-5 on some processors.
    model = models.load(str(folder), "policy=float64")
    params = load_weights(folder, spec_of(model.init))
    tokens = md.named(np.arange(24).reshape(2, 12).astype("int32"), ["batch", "length"])
    scores = scores_of(model)
    expected = np.asarray(md.jit(scores, backend="numpy")(params, tokens))
    for layout in LAYOUTS:
        split = md.jit(scores, mesh="data:2,model:2", layout=layout, backend="numpy")
        np.testing.assert_allclose(np.asarray(split(params, tokens)), expected, atol=1e-12)


def test_a_block_is_the_slice_of_the_parameter(tmp_path):
    """Each process reads blocks: any of them, also of merged dims that are split inside."""
    rng = np.random.default_rng(0)
    for number, config in enumerate(CONFIGS.values()):
        folder = write_folder(tmp_path / str(number), config)
        files = Weights(folder).files
        like = spec_of(models.load(str(folder)).init)
        for path, leaf in by_path(load_weights(folder, like)).items():
            whole = np.asarray(leaf)
            for _ in range(5):
                ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in whole.shape]
                block = files.read(path, [tuple(map(int, each)) for each in ends], whole.dtype)
                expected = whole[tuple(slice(*each) for each in ends)]
                np.testing.assert_array_equal(block, expected, err_msg=path)


def test_settings_become_a_configuration(tmp_path):
    folder = write_folder(tmp_path / "llama", CONFIGS["llama 3.1"])
    config = models.load(str(folder)).config
    assert (config.layers, config.embed, config.heads, config.kv_heads) == (3, 24, 6, 2)
    assert (config.kv, config.rotary_base, config.tied, config.bias) == (8, 100.0, True, True)
    assert (config.rotary_scaling, config.rotary_factor, config.rotary_original) == (
        "llama3",
        8,
        16,
    )
    # transformers 5 writes these settings otherwise
    settings = json.loads((folder / "config.json").read_text())
    scaling = settings.pop("rope_scaling") | {"rope_theta": settings.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(settings | {"rope_parameters": scaling}))
    assert models.load(str(folder)).config == config


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2_small", "gpt2"),
        ("llama_7b", "llama"),
        ("llama3_8b", "llama"),
        ("mixtral_8x7b", "mixtral"),
        ("bert_base", "bert"),
        ("t5_small", "t5"),
        ("deepseek_mini", "deepseek_v2"),
    ],
)
def test_named_models_have_a_family(name, family):
    found, settings = family_for(models.load(name).config)
    assert found.name == settings["model_type"] == family


def test_a_model_of_no_family_is_told_why():
    with pytest.raises(ValueError) as error:
        family_for(models.load("gpt_mini").config)
    head, first, *others = str(error.value).splitlines()
    assert head == (
        "no family of Hugging Face has such models; one that is trained with "
        '--model_args="mlp=swiglu" is of llama'
    )
    assert first == "  llama, mistral, mixtral, phi3: needs mlp=swiglu, not gelu"
    assert "  gpt2: needs norm=layer, not rms; needs positions=learned, not rotary; " in str(
        error.value
    )
    assert others[-1] == "  bert, roberta, xlm-roberta: TransformerConfig is no BertConfig"
    family, _ = family_for(models.load("gpt_mini", "mlp=swiglu").config)
    assert family.name == "llama"


def test_a_need_that_is_no_single_field_gives_no_changes():
    config = models.load("llama_7b", "norm=layer,rotary_scaling=dynamic,rotary_original=8").config
    with pytest.raises(ValueError) as error:
        family_for(config, "llama")
    head, reason = str(error.value).splitlines()
    assert head == "no family of Hugging Face has such models"
    assert "needs rotary_original=2048 for dynamic scaling" in reason


def refused(tmp_path, settings):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(
        settings if isinstance(settings, str) else json.dumps(settings)
    )
    with pytest.raises(ValueError) as error:
        models.load(str(tmp_path))
    return str(error.value)


def test_configurations_that_cannot_be_had_are_told(tmp_path):
    wrong = refused(tmp_path, {"model_type": "lama", "architectures": ["LamaForCausalLM"]})
    assert "has model_type='lama' (LamaForCausalLM). Did you mean `llama`?" in wrong
    assert "The families that can be read are gpt2, llama" in wrong
    assert "has no model_type" in refused(tmp_path, {})
    assert "cannot be read" in refused(tmp_path, "{")
    scaling = {"rope_type": "proportional", "factor": 4.0}
    many = CONFIGS["llama 2"] | {"hidden_act": "gelu", "mlp_bias": True, "rope_scaling": scaling}
    text = refused(tmp_path, {n: v for n, v in many.items() if n != "hidden_size"})
    assert text.splitlines()[1:] == [
        "  hidden_act='gelu': meshdsl has only 'silu' for this family",
        "  mlp_bias=True: meshdsl has only False for this family",
        "  hidden_size: missing",
        "  rope_type='proportional': meshdsl has default, linear, dynamic, llama3, yarn, longrope",
    ]
    uneven = CONFIGS["llama 2"] | {"num_key_value_heads": 4}
    assert "heads=6 do not share kv_heads=4 equally" in refused(tmp_path, uneven)
    sizes = CONFIGS["llama 2"] | {"vocab_size": "67"}
    assert "vocab_size='67': needs a whole number of at least 1" in refused(tmp_path, sizes)


def test_a_folder_without_its_configuration_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json, which says what model"):
        models.load(str(tmp_path))


def test_encoders_that_cannot_be_had_are_told(tmp_path):
    wrong = {"is_decoder": True, "position_embedding_type": "relative_key", "hidden_act": "silu"}
    assert refused(tmp_path, {**CONFIGS["bert"], **wrong}).splitlines()[1:] == [
        "  hidden_act='silu': meshdsl has gelu_new, gelu_pytorch_tanh, relu, gelu for this family",
        "  is_decoder=True: meshdsl has only False for this family",
        "  position_embedding_type='relative_key': meshdsl has only 'absolute' for this family",
    ]
    wrong = {"hidden_act": "relu", "pad_token_id": "<pad>", "tie_word_embeddings": False}
    assert refused(tmp_path, {**CONFIGS["roberta"], **wrong}).splitlines()[1:] == [
        "  hidden_act='relu': meshdsl has only 'gelu' for this family",
        "  pad_token_id='<pad>': needs a token; positions start after it",
        "  tie_word_embeddings=False: meshdsl has only True for this family",
    ]
    far = CONFIGS["roberta"] | {"pad_token_id": 40}
    assert "first_position=41 leaves none of max_length=32" in refused(tmp_path, far)


def test_masks_are_those_of_the_tokenizer_of_the_folder(tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS["bert"])
    assert models.load(str(folder)).config.mask_token == 66  # 103 is beyond the vocabulary
    added = {"added_tokens": [{"id": 0, "content": "[PAD]"}, {"id": 4, "content": "[MASK]"}]}
    (folder / "tokenizer.json").write_text(json.dumps(added))
    assert models.load(str(folder)).config.mask_token == 4
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        models.load(str(folder))


def test_tensors_of_very_old_folders_and_of_heads_that_are_not_here_do_not_matter(tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS["bert"])
    params = load_weights(folder, spec_of(models.load(str(folder)).init))
    tensors = tensors_of(folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): array
        for name, array in tensors.items()
    }
    old["cls.seq_relationship.weight"] = old["bert.pooler.dense.bias"] = np.zeros(2, "float32")
    save_file(old, folder / "model-0.safetensors")
    again = load_weights(folder, spec_of(models.load(str(folder)).init))
    for path, leaf in by_path(params).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(by_path(again)[path]))


def test_rotations_of_layers_with_a_window_are_read_as_either_version_writes_them(tmp_path):
    old = CONFIGS["gemma3"]
    usual = {"rope_theta": 1000.0, **old["rope_scaling"]}
    of_window = {"rope_type": "default", "rope_theta": 10.0}
    both = {"full_attention": usual, "sliding_attention": of_window}
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    new = {name: value for name, value in old.items() if name not in names}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    new |= {"rope_parameters": both, "layer_types": kinds}
    configs = []
    for number, settings in enumerate((old, new)):
        folder = write_folder(tmp_path / str(number), settings)
        configs.append(models.load(str(folder)).config)
    assert configs[0] == configs[1]
    assert (configs[0].rotary_base, configs[0].rotary_window_base) == (1000, 10)
    assert (configs[0].window_pattern, configs[0].rotary_factor) == ((1, 1, 0), 4)
    of_window = {"rope_type": "linear", "rope_theta": "10", "factor": 2.0}
    new["rope_parameters"] = both | {"sliding_attention": of_window}
    new["attn_logit_softcapping"] = 5.0
    assert refused(tmp_path, new).splitlines()[1:] == [
        "  rope_parameters, sliding_attention: rope_type='linear': meshdsl has only 'default' for "
        "this family",
        "  rope_parameters, sliding_attention: rope_theta='10': needs a number",
        "  attn_logit_softcapping=5.0: meshdsl has only None for this family",
    ]


def test_encoder_decoders_that_cannot_be_had_are_told(tmp_path):
    wrong = {
        "num_decoder_layers": 2,
        "feed_forward_proj": "gated-relu",
        "is_encoder_decoder": False,
    }
    assert refused(tmp_path, {**CONFIGS["t5"], **wrong}).splitlines()[1:] == [
        "  is_encoder_decoder=False: meshdsl has only True for this family",
        "  num_decoder_layers=2: meshdsl has only 3 for this family",
        "  feed_forward_proj='gated-relu': meshdsl has relu, gated-gelu, gated-gelu_new, "
        "gated-silu, gelu_new, gelu for this family",
    ]


def test_a_decoder_with_distances_is_no_encoder_decoder():
    config = models.load("gpt_mini", "positions=relative,mlp=relu,scaled=false").config
    with pytest.raises(ValueError, match="t5: TransformerConfig is no T5Config"):
        family_for(config)


def test_the_head_of_t5_is_told_by_what_either_version_of_transformers_writes(tmp_path):
    for number, (more, tied) in enumerate(
        [
            ({}, True),
            ({"tie_word_embeddings": False}, False),
            ({"scale_decoder_outputs": False}, False),
        ]
    ):
        folder = write_folder(tmp_path / str(number), {**CONFIGS["t5"], **more})
        assert models.load(str(folder)).config.tied == tied
        assert ("lm_head.weight" in tensors_of(folder)) != tied


def test_scalings_of_rotations_become_a_configuration(tmp_path):
    def read(case, **scaling):
        settings = CONFIGS[case] | {"rope_scaling": {**CONFIGS[case]["rope_scaling"], **scaling}}
        tmp_path.joinpath("config.json").write_text(json.dumps(settings))
        return models.load(str(tmp_path)).config

    yarn = read("llama, yarn")
    assert (yarn.rotary_scaling, yarn.rotary_factor, yarn.rotary_original) == ("yarn", 4, 16)
    assert (yarn.rotary_low, yarn.rotary_high, yarn.rotary_magnitude) == (0.5, 2, None)
    assert yarn.scaling.size == pytest.approx(0.1 * np.log(4) + 1)
    assert read("llama, yarn", attention_factor=1.25).scaling.size == 1.25
    # DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.4: sqrt(t) = 0.0707 ln s + 1 of both
    same = read("llama, yarn", mscale=0.707, mscale_all_dim=0.707)
    assert same.scaling.size == 1
    assert read("llama, yarn", factor=None).rotary_factor == 64 / 16
    assert read("llama, dynamic").rotary_original == 12
    for case in ("llama, longrope", "phi3, 128k"):
        config = read(case)
        assert config.rotary_short == (1, 1.5, 2, 2.5) and config.rotary_long == (1, 3, 9, 27)
        assert (config.rotary_factor, config.rotary_original) == (64 / 16, 16)
        assert config.scaling.size == pytest.approx(np.sqrt(1 + np.log(4) / np.log(16)))


def test_scalings_of_rotations_that_cannot_be_had_are_told(tmp_path):
    def told(case, **scaling):
        scaling = {**CONFIGS[case]["rope_scaling"], **scaling}
        return refused(tmp_path, CONFIGS[case] | {"rope_scaling": scaling}).splitlines()[1:]

    assert told("llama, yarn", truncate=False, beta_fast="32", factor=0.5) == [
        "  beta_fast='32': needs a number",
        "  truncate=False: meshdsl has only True for this family",
    ]
    assert told("llama, dynamic", factor=None) == ["  factor: missing"]
    assert told("llama, longrope", long_factor=[1, 2], short_factor="1") == [
        "  short_factor: needs a list of numbers, one for each pair of features"
    ]
    assert told("llama, longrope", long_factor=[1, 2]) == [
        "  rotary_long: 2 numbers; rotary_scaling=longrope needs 4, above 0, one for each pair of "
        "features"
    ]
    assert told("phi3, 128k", type="linear", factor=2.0) == [
        "  rope_type='linear': Phi-3 has none of this"
    ]


def test_scalings_that_a_family_cannot_say_keep_a_model_from_it():
    def reason(family, overrides):
        with pytest.raises(ValueError) as error:
            family_for(models.load("llama3_8b", overrides).config, family)
        return str(error.value).splitlines()[-1]

    dynamic = "rotary_scaling=dynamic,rotary_original=64"
    assert reason("llama", dynamic) == (
        "  llama: needs rotary_original=8192 for dynamic scaling, as max_length, not 64"
    )
    magnitude = "rotary_scaling=linear,rotary_magnitude=2"
    assert reason("qwen3", f"{magnitude},query_key_norm=true").endswith(
        "needs no rotary_magnitude for linear scaling"
    )
    size = "embed=16,heads=4,kv_heads=2,kv=4,d_ff=8,max_length=64,rotary_original=16"
    long = f"{size},rotary_scaling=longrope,rotary_short=1+2,rotary_long=3+4"
    assert reason("phi3", f"{long},rotary_factor=2") == (
        "  phi3: needs rotary_factor = max_length / rotary_original and no rotary_magnitude"
    )
    assert reason("phi3", f"{size},rotary_scaling=linear") == (
        "  phi3: needs rotary_scaling=none or longrope, not linear"
    )
    settings = family_for(models.load("llama3_8b", f"{long},rotary_factor=4").config, "phi3")[1]
    assert {*settings["rope_scaling"]} == {"type", "short_factor", "long_factor"}


def test_latent_attention_that_cannot_be_had_is_told(tmp_path):
    wrong = {
        "v_head_dim": 16,
        "num_key_value_heads": 3,
        "moe_layer_freq": 2,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "attention_bias": True,
        "quantization_config": {"quant_method": "fp8"},
    }
    assert refused(tmp_path, {**CONFIGS["deepseek_v2"], **wrong}).splitlines()[1:] == [
        "  quantization_config: the weights are quantised (fp8); take those in bfloat16, or write "
        "such with transformers",
        "  norm_topk_prob=True: meshdsl has only False for this family",
        "  topk_method='noaux_tc': meshdsl has greedy, group_limited_greedy for this family",
        "  attention_bias=True: meshdsl has only False for this family",
        "  moe_layer_freq=2: meshdsl has only 1 for this family",
        "  rms_norm_eps=1e-05: meshdsl has only 1e-06 for this family",
        "  num_key_value_heads=3: meshdsl has only 6 for this family",
        "  v_head_dim=16: meshdsl has only 8 for this family",
    ]
    wrong = {"rope_interleave": False, "scoring_func": "softmax"}
    assert refused(tmp_path, {**CONFIGS["deepseek_v3"], **wrong}).splitlines()[1:] == [
        "  scoring_func='softmax': meshdsl has only 'sigmoid' for this family",
        "  rope_interleave=False: meshdsl has only True for this family",
    ]


def test_scales_of_latent_attention_are_those_of_yarn(tmp_path):
    folder = write_folder(tmp_path / "in", CONFIGS["deepseek_v3"])
    config = models.load(str(folder)).config
    assert config.query_scale == pytest.approx((0.1 * np.log(4) + 1) ** 2 / np.sqrt(8 + 4))
    assert config.scaling.size == 1
    settings = family_for(config)[1]
    assert settings["rope_scaling"]["mscale_all_dim"] == 1
    # vLLM sharpens no scores where there is an attention_factor of 1.
    assert settings["rope_scaling"]["mscale"] == 1
    assert "attention_factor" not in settings["rope_scaling"]

    def reason(**fields):
        with pytest.raises(ValueError) as error:
            family_for(dataclasses.replace(config, **fields), "deepseek_v3")
        return str(error.value).splitlines()[-1]

    plain = {"rotary_scaling": "none", "rotary_magnitude": None}
    assert reason(**plain).endswith("needs no query_scale, but with yarn")
    assert reason(query_scale=0.1).endswith("needs query_scale above 0.288675")
    assert reason(norm_eps=1e-5).endswith("needs norm_eps=1e-06, not 1e-05")
    assert reason(shared_experts=0).endswith("needs shared_experts of at least 1")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    settings = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    folder = write_folder(tmp_path / "in", settings)
    tensors = tensors_of(folder)
    one = np.zeros(2, "float32")
    save_file({**tensors, "model.layers.4.eh_proj.weight": one}, folder / "model-0.safetensors")
    Weights(folder)
    save_file({**tensors, "model.layers.5.eh_proj.weight": one}, folder / "model-0.safetensors")
    with pytest.raises(ValueError, match=r"layers\.5\.eh_proj\.weight: not of such a model"):
        Weights(folder)
