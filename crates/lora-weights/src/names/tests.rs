use super::*;
use crate::ModuleSet;
use lora_config::{ModelSpec, TokenTable};
use proptest::prelude::*;

fn all_modules() -> NameRules {
    NameRules {
        modules: LoraModule::every().fold(ModuleSet::EMPTY, ModuleSet::with),
        accept_bare_names: false,
    }
}

fn key(rest: &str) -> String {
    format!("base_model.model.model.layers.{rest}.lora_A.weight")
}

fn place(name: &str, spec: &ModelSpec) -> Result<(usize, LoraTarget), RejectReason> {
    classify_key(name, spec, &all_modules())
        .map(|(layer, target, _)| (layer, target))
        .map_err(|reject| reject.reason)
}

fn at(rest: &str, spec: &ModelSpec) -> Result<(usize, LoraTarget), RejectReason> {
    place(&key(rest), spec)
}

fn expert(n: usize, proj: ExpertProj) -> LoraTarget {
    LoraTarget::Expert { n, proj }
}

#[test]
fn every_module_is_found_by_its_own_name_with_its_own_dims() {
    use LoraModule as M;
    let q_out = [
        (specs::llama(), 0, M::QProj, (32, 32)),
        (specs::llama(), 0, M::KProj, (16, 32)),
        (specs::llama(), 1, M::VProj, (16, 32)),
        (specs::llama(), 1, M::OProj, (32, 32)),
        (specs::llama(), 0, M::GateProj, (40, 32)),
        (specs::llama(), 0, M::UpProj, (40, 32)),
        (specs::llama(), 0, M::DownProj, (32, 40)),
        (specs::qwen3_5(), 1, M::QProj, (64, 32)),
        (specs::qwen3_5(), 0, M::OutProj, (32, 24)),
        (specs::qwen3_5(), 0, M::InProjQkv, (56, 32)),
        (specs::qwen3_5(), 0, M::InProjZ, (24, 32)),
        (specs::qwen3_5(), 0, M::InProjA, (4, 32)),
        (specs::qwen3_5(), 0, M::InProjB, (4, 32)),
        (specs::qwen3_next(), 0, M::InProjQkvz, (80, 32)),
        (specs::qwen3_next(), 0, M::InProjBa, (8, 32)),
        (specs::phi3(), 0, M::QkvProj, (64, 32)),
        (specs::phi3(), 0, M::GateUpProj, (80, 32)),
        (specs::phi3(), 0, M::DownProj, (32, 40)),
        (specs::qwen3_moe(), 1, M::SharedGateProj, (20, 32)),
        (specs::qwen3_moe(), 1, M::SharedUpProj, (20, 32)),
        (specs::qwen3_moe(), 1, M::SharedDownProj, (32, 20)),
        (specs::qwen3_moe(), 1, M::SharedExpertGate, (1, 32)),
    ];
    for (spec, layer, module, dims) in q_out {
        let name = format!("{layer}.{}", module.peft_name());
        assert_eq!(
            at(&name, &spec),
            Ok((layer, LoraTarget::Attn(module))),
            "{name}"
        );
        assert_eq!(module.dims(&spec, layer), Some(dims), "{name}");
    }
}

#[test]
fn a_model_has_not_every_module_on_every_layer() {
    use LoraModule as M;
    for (spec, layer, module) in [
        (specs::llama(), 2, M::QProj),
        (specs::llama(), 0, M::OutProj),
        (specs::llama(), 0, M::SharedGateProj),
        (specs::llama(), 0, M::QkvProj),
        (specs::phi3(), 0, M::QProj),
        (specs::phi3(), 0, M::UpProj),
        (specs::qwen3_5(), 0, M::QProj),
        (specs::qwen3_5(), 1, M::OutProj),
        (specs::qwen3_5(), 0, M::InProjQkvz),
        (specs::qwen3_next(), 0, M::InProjZ),
        (specs::qwen3_moe(), 1, M::DownProj),
        (specs::qwen3_moe(), 0, M::SharedExpertGate),
        (specs::llama4(), 1, M::SharedExpertGate),
    ] {
        assert!(!module.applies_to_layer(&spec, layer), "{module:?}");
    }
}

#[test]
fn linear_attention_layers_are_no_full_attention_layers() {
    assert_eq!(full_attention_layers(&specs::qwen3_5()), [1]);
    assert_eq!(full_attention_layers(&specs::llama()), [0, 1]);
}

#[test]
fn routers_and_experts_are_placed_in_every_spelling() {
    let (moe, oss, llama4) = (specs::qwen3_moe(), specs::gpt_oss(), specs::llama4());
    let cases = [
        (&moe, "1.mlp.gate", LoraTarget::Router),
        (&moe, "1.block_sparse_moe.gate", LoraTarget::Router),
        (&oss, "0.mlp.router", LoraTarget::Router),
        (&llama4, "1.feed_forward.router", LoraTarget::Router),
        (
            &moe,
            "1.mlp.experts.2.gate_proj",
            expert(2, ExpertProj::Gate),
        ),
        (&moe, "1.mlp.experts.0.up_proj", expert(0, ExpertProj::Up)),
        (
            &moe,
            "1.mlp.experts.1.down_proj",
            expert(1, ExpertProj::Down),
        ),
        (
            &moe,
            "1.block_sparse_moe.experts.1.w1",
            expert(1, ExpertProj::Gate),
        ),
        (
            &moe,
            "1.block_sparse_moe.experts.1.w3",
            expert(1, ExpertProj::Up),
        ),
        (
            &moe,
            "1.block_sparse_moe.experts.1.w2",
            expert(1, ExpertProj::Down),
        ),
        (
            &llama4,
            "0.feed_forward.up_proj",
            LoraTarget::Attn(LoraModule::UpProj),
        ),
        (
            &llama4,
            "1.feed_forward.shared_expert.up_proj",
            LoraTarget::Attn(LoraModule::SharedUpProj),
        ),
    ];
    for (spec, name, target) in cases {
        assert_eq!(at(name, spec).map(|(_, t)| t), Ok(target), "{name}");
    }
}

#[test]
fn names_that_cannot_be_placed_say_why() {
    use RejectReason as R;
    let (llama, moe, hybrid) = (specs::llama(), specs::qwen3_moe(), specs::qwen3_5());
    let cases = [
        (&llama, "0.self_attn.rotary", R::UnsupportedModule),
        (&llama, "0.q_proj", R::UnsupportedModule),
        (&llama, "0.self_attn.qkv_proj", R::UnsupportedModule),
        (&llama, "0.mlp.shared_expert.up_proj", R::UnsupportedModule),
        (&llama, "2.self_attn.q_proj", R::LayerOutOfRange),
        (
            &llama,
            "99999999999999999999999.self_attn.q_proj",
            R::LayerOutOfRange,
        ),
        (&llama, "01.self_attn.q_proj", R::MalformedLayerIndex),
        (&llama, "-1.self_attn.q_proj", R::MalformedLayerIndex),
        (&llama, "+1.self_attn.q_proj", R::MalformedLayerIndex),
        (&llama, ".self_attn.q_proj", R::MalformedLayerIndex),
        (&llama, "x.self_attn.q_proj", R::MalformedLayerIndex),
        (&llama, "0", R::MalformedKey),
        (&llama, "0.", R::MalformedKey),
        (&llama, "0.self_attn..q_proj", R::MalformedKey),
        (&llama, "0.mlp.experts.0.up_proj", R::ExpertLoraOnDenseModel),
        (&llama, "0.mlp.gate", R::ExpertLoraOnDenseModel),
        (&moe, "0.mlp.gate", R::ExpertLoraOnDenseModel),
        (&moe, "0.mlp.experts.0.up_proj", R::ExpertLoraOnDenseModel),
        (&moe, "1.mlp.up_proj", R::UnsupportedModule),
        (&moe, "1.mlp.experts", R::FusedExpertLora),
        (&moe, "1.mlp.experts.base_layer", R::FusedExpertLora),
        (&moe, "1.mlp.experts.gate_up_proj", R::FusedExpertLora),
        (&moe, "1.mlp.experts.w1", R::FusedExpertLora),
        (&moe, "1.mlp.experts.-1.up_proj", R::MalformedExpertIndex),
        (&moe, "1.mlp.experts.00.up_proj", R::MalformedExpertIndex),
        (&moe, "1.mlp.experts.x", R::MalformedExpertIndex),
        (&moe, "1.mlp.experts.3.up_proj", R::ExpertOutOfRange),
        (&moe, "1.mlp.experts.2.w1", R::UnsupportedExpertProj),
        (
            &moe,
            "1.block_sparse_moe.experts.2.up_proj",
            R::UnsupportedExpertProj,
        ),
        (&moe, "1.mlp.experts.2.up_proj.x", R::UnsupportedExpertProj),
        (&hybrid, "0.self_attn.q_proj", R::NonFullAttentionLayer),
        (&hybrid, "1.linear_attn.out_proj", R::GdnOutOnAttentionLayer),
        (&hybrid, "1.linear_attn.in_proj_z", R::GdnTarget),
        (&hybrid, "0.linear_attn.in_proj_qkvz", R::GdnTarget),
        (&hybrid, "0.linear_attn.conv1d", R::GdnTarget),
    ];
    for (spec, name, reason) in cases {
        assert_eq!(at(name, spec), Err(reason), "{name}");
    }
}

#[test]
fn names_outside_pairs_of_text_layers_say_why() {
    use RejectReason as R;
    let spec = specs::llama();
    for (name, reason) in [
        (
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            R::NotPeftKey,
        ),
        ("lora_unet_x.lora_down.weight", R::NotPeftKey),
        ("", R::NotPeftKey),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.weight",
            R::UnrecognizedTensor,
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_E",
            R::UnrecognizedTensor,
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A",
            R::UnrecognizedTensor,
        ),
        ("base_model.model.", R::UnrecognizedTensor),
        ("base_model.model.lora_A.weight", R::UnrecognizedTensor),
        (
            "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight",
            R::NonLayerModule,
        ),
        (
            "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
            R::NonLayerModule,
        ),
        (
            "base_model.model.mtp.layers.0.self_attn.q_proj.lora_A.weight",
            R::NonLayerModule,
        ),
        (
            "base_model.model.audio.layers.0.self_attn.q_proj.lora_A.weight",
            R::NonLayerModule,
        ),
        ("base_model.model.lm_head.lora_A.weight", R::NonLayerModule),
        (
            "base_model.model.model.layers.lora_A.weight",
            R::MalformedKey,
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A..weight",
            R::MalformedKey,
        ),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            R::LoraEmbeddingUnimplemented,
        ),
    ] {
        assert_eq!(place(name, &spec), Err(reason), "{name}");
    }
}

#[test]
fn text_layers_are_the_same_behind_every_prefix_of_theirs() {
    let q = Ok((1, LoraTarget::Attn(LoraModule::QProj)));
    for name in [
        "base_model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.language_model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "_orig_mod.base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model._fsdp_wrapped_module.model.layers.1._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
    ] {
        assert_eq!(place(name, &specs::llama()), q, "{name}");
    }
}

#[test]
fn bare_names_are_taken_when_asked() {
    let rules = NameRules {
        accept_bare_names: true,
        ..NameRules::default()
    };
    let spec = specs::llama();
    let name = "model.layers.0.mlp.up_proj.lora_B.weight";
    let up = LoraTarget::Attn(LoraModule::UpProj);
    assert_eq!(classify_key(name, &spec, &rules), Ok((0, up, AdapterAb::B)));
}

#[test]
fn modules_without_room_in_the_pool_are_refused_by_name() {
    use RejectReason as R;
    let qv = ModuleSet::EMPTY
        .with(LoraModule::QProj)
        .with(LoraModule::VProj);
    let rules = NameRules {
        modules: qv,
        accept_bare_names: false,
    };
    let reason = |rest: &str, spec: &ModelSpec| {
        classify_key(&key(rest), spec, &rules).map_err(|reject| reject.reason)
    };
    assert!(reason("0.self_attn.q_proj", &specs::llama()).is_ok());
    for (spec, rest, want) in [
        (specs::llama(), "0.self_attn.k_proj", R::UnsupportedModule),
        (specs::qwen3_5(), "0.linear_attn.in_proj_qkv", R::GdnTarget),
        (
            specs::qwen3_moe(),
            "1.mlp.shared_expert.up_proj",
            R::UnsupportedModule,
        ),
        (specs::phi3(), "0.self_attn.qkv_proj", R::UnsupportedModule),
    ] {
        assert_eq!(reason(rest, &spec), Err(want), "{rest}");
    }
}

#[test]
fn gdn_keys_are_linear_attention_without_its_output() {
    assert!(is_gdn_key(&key("0.linear_attn.in_proj_qkv")));
    assert!(is_gdn_key(
        "base_model.model.model.layers.0.linear_attn.conv1d.weight"
    ));
    assert!(is_gdn_key(&key("0.linear_attn.out_proj2")));
    assert!(!is_gdn_key(&key("0.linear_attn.out_proj")));
    assert!(!is_gdn_key(&key("0.self_attn.q_proj")));
}

#[test]
fn tables_of_the_vocabulary_are_recognised_by_table_and_kind() {
    use OverlayTensorKind as K;
    use TokenTable::{Embed, LmHead};
    for (path, want) in [
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
            Some((Embed, K::Delta)),
        ),
        (
            "model.embed_tokens.token_adapter.base_layer.weight",
            Some((Embed, K::Base)),
        ),
        (
            "lm_head.token_adapter.trainable_tokens_delta",
            Some((LmHead, K::Delta)),
        ),
        (
            "lm_head.token_adapter.base_layer.weight",
            Some((LmHead, K::Base)),
        ),
        ("model.embed_tokens.weight", Some((Embed, K::FullTable))),
        (
            "model.language_model.embed_tokens.weight",
            Some((Embed, K::FullTable)),
        ),
        ("model.shared.weight", Some((Embed, K::FullTable))),
        (
            "lm_head.modules_to_save.weight",
            Some((LmHead, K::FullTable)),
        ),
        (
            "model.embed_tokens.lora_embedding_A",
            Some((Embed, K::EmbeddingA)),
        ),
        (
            "model.embed_tokens.lora_embedding_B",
            Some((Embed, K::EmbeddingB)),
        ),
        ("lm_head.original_module.weight", None),
        ("lm_head.lora_A.weight", None),
        ("lm_head.lora_B.weight", None),
        ("lm_head.base_layer.weight", None),
        ("model.layers.0.embed_tokens.weight", None),
        ("mtp.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("score.weight", None),
        ("my_lm_head.weight", None),
    ] {
        let name = format!("base_model.model.{path}");
        assert_eq!(classify_overlay_key(&name, &all_modules()), want, "{name}");
        assert_eq!(
            classify_overlay_key(path, &all_modules()),
            None,
            "{path} has no prefix"
        );
    }
}

#[test]
fn a_second_tensor_for_a_table_and_kind_is_given_back() {
    let tensor = |id| OverlayTensor {
        module: TokenTable::Embed,
        kind: OverlayTensorKind::Delta,
        id: crate::TensorId(id),
        name: id.to_string(),
        shape: vec![1, 2],
    };
    let mut overlays = OverlayTensors::default();
    overlays.insert(tensor(0)).unwrap();
    assert_eq!(overlays.insert(tensor(1)), Err(tensor(1)));
    assert_eq!(overlays.len(), 1);
}

#[test]
fn low_rank_embeddings_are_the_only_pending_overlays() {
    let tensor = |kind| OverlayTensor {
        module: TokenTable::Embed,
        kind,
        id: crate::TensorId(0),
        name: "embed".to_owned(),
        shape: vec![4, 48],
    };
    for kind in OverlayTensorKind::ALL {
        let mut overlays = OverlayTensors::default();
        overlays.insert(tensor(kind)).unwrap();
        let low_rank = matches!(
            kind,
            OverlayTensorKind::EmbeddingA | OverlayTensorKind::EmbeddingB
        );
        assert_eq!(
            reject_pending_overlay(&overlays).is_err(),
            low_rank,
            "{kind:?}"
        );
    }
}

#[test]
fn reasons_are_distinct_and_shown_in_brackets() {
    let words: std::collections::BTreeSet<_> =
        RejectReason::ALL.iter().map(|r| r.as_str()).collect();
    assert_eq!(words.len(), RejectReason::ALL.len());
    let reject = classify_key("x", &specs::llama(), &all_modules()).unwrap_err();
    assert!(reject.to_string().starts_with("REJECT[not-peft-key]: x: "));
}

/// Names made of the pieces that the parser looks for, in any order, so that odd joints are hit.
fn odd_name() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "base_model.model.",
        "model.",
        "layers.",
        "language_model.",
        "0.",
        "1.",
        "01.",
        "-1.",
        "_orig_mod.",
        "self_attn.",
        "q_proj.",
        "mlp.",
        "experts.",
        "base_layer.",
        "gate_up_proj.",
        "linear_attn.",
        "lora_A.",
        "lora_B.",
        "default.",
        "weight",
        "..",
        "é",
        "lora_embedding_A",
        "lm_head.",
        "embed_tokens.",
        "token_adapter.",
        "\u{0}",
    ]);
    prop::collection::vec(pieces, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_name_is_placed_or_refused_without_a_panic(name in prop_oneof![any::<String>(), odd_name()]) {
        for spec in [specs::llama(), specs::qwen3_moe(), specs::qwen3_5(), specs::llama4(), specs::gpt_oss()] {
            if let Ok((layer, target, _)) = classify_key(&name, &spec, &all_modules()) {
                prop_assert!(target.dims(&spec, layer).is_some());
            }
            let _ = classify_overlay_key(&name, &all_modules());
        }
    }

    #[test]
    fn what_is_placed_is_written_back_to_the_same_place(layer in 0usize..2, which in 0usize..20) {
        let module = LoraModule::every().nth(which).unwrap();
        for spec in [specs::llama(), specs::qwen3_moe(), specs::qwen3_5(), specs::llama4(), specs::phi3()] {
            let placed = at(&format!("{layer}.{}", module.name_in(&spec)), &spec);
            prop_assert_eq!(placed.is_ok(), module.applies_to_layer(&spec, layer));
        }
    }
}
