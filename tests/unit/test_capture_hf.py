"""Capture of Hugging Face models: experts become moe:: operators, and model and config stay as they were."""

from typing import Any

import pytest
import torch

from moecompile import meta
from moecompile.capture import capture_model
from moecompile.errors import CaptureError
from moecompile.program import InputKind, OutputKind
from tests.support.captured_call import assert_close, assert_matches_eager, gradients, run_captured, targets
from tests.support.hf_models import FAMILIES, batch, build

pytest.importorskip("transformers")

INTERFACE = tuple(name for name in FAMILIES if name != "jetmoe")


@pytest.mark.parametrize("name", FAMILIES)
def test_family_matches_eager_on_another_batch(name: str) -> None:
    model = build(name)
    captured = capture_model(model, (), batch(seed=0))
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)


@pytest.mark.parametrize("name", INTERFACE)
def test_experts_are_captured_in_split_form(name: str) -> None:
    captured = capture_model(build(name), (), batch())
    ops = targets(captured)
    layers = ops.count("moe.permute.default")
    assert layers >= 1
    assert ops.count("moe.grouped_linear.default") == 2 * layers
    assert ops.count("moe.unpermute.default") == layers
    assert not [op for op in ops if "nonzero" in op or "grouped_mm" in op]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_config_and_registry_are_left_as_they_were(implementation: str) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = build("mixtral")
    model.set_experts_implementation(implementation)
    before, config = set(ALL_EXPERTS_FUNCTIONS.valid_keys()), model.config.to_dict()
    params = dict(model.named_parameters())
    capture_model(model, (), batch())
    assert model.config._experts_implementation == implementation
    assert model.config.to_dict() == config
    assert set(ALL_EXPERTS_FUNCTIONS.valid_keys()) == before
    assert all(parameter is params[name] for name, parameter in model.named_parameters())


def test_config_is_restored_when_capture_fails() -> None:
    model = build("mixtral")
    model.set_experts_implementation("eager")

    def refuse(output: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(CaptureError, match="ValueError: no"):
        capture_model(model, (), batch(), loss_fn=refuse)
    assert model.config._experts_implementation == "eager"


def test_experts_that_transformers_has_sharded_are_refused() -> None:
    model = build("mixtral")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(CaptureError, match="without its own expert parallelism"):
        capture_model(model, (), batch())


def test_inputs_and_outputs_are_described() -> None:
    model = build("qwen3_moe")
    captured = capture_model(model, (), batch())
    params = [item.fqns[0] for item in captured.inputs if item.kind is InputKind.PARAM]
    assert params == [name for name, _ in model.named_parameters()]
    calls = [(item.name, item.leaf) for item in captured.inputs if item.kind is InputKind.BATCH]
    assert calls == [("input_ids", 0), ("labels", 1)]
    assert captured.loss_index == 0 and captured.outputs[0].kind is OutputKind.LOSS
    nodes = captured.graph_module.graph.nodes
    assert "model.layers.1.mlp.experts" in {meta.module_path(node) for node in nodes}


def test_causal_mask_becomes_is_causal() -> None:
    captured = capture_model(build("qwen3_moe"), (), batch())
    attention = [node for node in captured.graph_module.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(attention) == 2
    assert all(node.args[3:] == (None, 0.0, True) for node in attention)


def test_sliding_window_shorter_than_the_sequence_keeps_its_mask() -> None:
    model = build("mixtral", sliding_window=4)
    captured = capture_model(model, (), batch())
    attention = [node for node in captured.graph_module.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert attention and all(node.args[3] is not None for node in attention)
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)


def test_padding_mask_stays_an_input() -> None:
    model = build("qwen3_moe")
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    captured = capture_model(model, (), {**batch(), "attention_mask": torch.ones_like(mask)})
    assert "attention_mask" in [item.name for item in captured.inputs]
    assert_matches_eager(captured, model, **batch(seed=5), attention_mask=mask, tolerance=2e-5)


def test_tied_embeddings_appear_once() -> None:
    model = build("qwen3_moe", tie_word_embeddings=True)
    captured = capture_model(model, (), batch())
    assert captured.shared == {"model.embed_tokens.weight": ("lm_head.weight",)}
    names = [item.fqns[0] for item in captured.inputs if item.kind is InputKind.PARAM]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)


def test_balance_loss_is_part_of_the_loss() -> None:
    model = build("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    captured = capture_model(model, (), batch())
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)


def test_autocast_matches_eager_under_autocast() -> None:
    model = build("mixtral", sliding_window=4)  # keeps its mask, so both sides run the same bf16 attention kernel
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture_model(model, (), batch())
        wanted = model(**batch(seed=5))
    assert targets(captured).count("aten._to_copy.default") > 10
    outs = run_captured(captured, model, **batch(seed=5))
    assert_close("loss", outs[0].detach(), wanted.loss.detach(), 5e-4)
    eager, graph = gradients(model, wanted.loss), gradients(model, outs[0])
    for name, reference in eager.items():
        # bf16 products are summed in another order inside the grouped operators: one bit is 4e-3.
        assert_close(name, graph[name], reference, 4e-2)


def test_meta_model_is_captured_for_the_device_of_its_inputs() -> None:
    with torch.device("meta"):
        model = build("qwen3_moe")
    captured = capture_model(model, (), batch())
    devices = {meta.tensor(node).device.type for node in captured.graph_module.graph.nodes if meta.is_tensor(node)}
    assert devices == {"cpu"}
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_cache_in_the_return_value_is_rebuilt() -> None:
    model = build("qwen3_moe")
    model.config.use_cache = True
    captured = capture_model(model, (), batch())
    assert captured.loss_index == 0
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)
    outs = run_captured(captured, model, **batch(seed=5))
    assert type(captured.rebuild(outs).past_key_values).__name__ == "DynamicCache"


def test_evaluation_without_labels_has_no_loss() -> None:
    model = build("mixtral").eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        captured = capture_model(model, (ids,), {})
        wanted = model(ids.flip(0)).logits
    assert captured.loss_index is None
    assert [item.name for item in captured.inputs if item.kind is InputKind.BATCH] == ["input_ids"]
    found = captured.rebuild(run_captured(captured, model, ids.flip(0))).logits
    assert_close("logits", found.detach(), wanted, 2e-5)


@pytest.mark.parametrize("parameters", [[], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]])
def test_lora_adapters_match_eager(parameters: list[str]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
    model = peft.get_peft_model(build("qwen3_moe"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = dict(model.named_parameters())
    captured = capture_model(model, (), batch())
    trained = {item.fqns[0] for item in captured.inputs if item.kind is InputKind.PARAM and item.requires_grad}
    assert trained == {name for name, parameter in before.items() if parameter.requires_grad}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert_matches_eager(captured, model, **batch(seed=5), tolerance=2e-5)


def test_bf16_parameters_and_fp64_parameters() -> None:
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float64, 1e-6)):
        model = build("qwen3_moe").to(dtype)
        captured = capture_model(model, (), batch())
        assert_matches_eager(captured, model, **batch(seed=5), tolerance=tolerance)


def test_activation_checkpointing_is_traced_through() -> None:
    model = build("qwen3_moe")
    plain = targets(capture_model(model, (), batch()))
    model.gradient_checkpointing_enable()
    assert targets(capture_model(model, (), batch())) == plain
