"""One module per vLLM seam, each with a `PATCH` record. `ALL` is the order in which they are reported."""

from drafttools.patches import (
    a4w4,
    aiter_bmm,
    breakable_graph_scope,
    compile_cache,
    custom_proposer_scope,
    draft_dtype,
    draft_quantization,
    expert_option,
    extract_proposer_scope,
    fp8_experts,
    graph_scope,
    initialize_scope,
    linear_activation,
    load_scope,
    marlin_input,
    medusa_scope,
    moe_activation,
    online_quantization,
    proposer_scope,
    publish_scope,
    quick_reduce,
    speculator_graphs,
    speculator_scope,
)
from drafttools.patching import Patch

ALL: tuple[Patch, ...] = tuple(
    module.PATCH
    for module in (
        publish_scope,
        load_scope,
        initialize_scope,
        proposer_scope,
        extract_proposer_scope,
        medusa_scope,
        custom_proposer_scope,
        speculator_scope,
        speculator_graphs,
        graph_scope,
        breakable_graph_scope,
        compile_cache,
        quick_reduce,
        a4w4,
        aiter_bmm,
        marlin_input,
        moe_activation,
        linear_activation,
        online_quantization,
        draft_quantization,
        draft_dtype,
        expert_option,
        fp8_experts,
    )
)
