//! What a config says it adapts: target modules, whole tables, token rows, and how stacked tensors are laid out.

use crate::common::{loads, refuses};
use lora_config::{
    DeclaredBuffers, FindingLevel, LoraBLayout, PeftVersion, TargetMatch, TargetModules,
    TokenTable, TrainableTokens,
};
use serde_json::{Value, json};

#[test]
fn target_lists_hold_names() {
    for field in ["target_modules", "exclude_modules"] {
        for value in [
            json!(3),
            json!(["q_proj", 3]),
            json!({"q_proj": 1}),
            json!(true),
        ] {
            refuses(field, json!({ field: value }), &["module names"]);
        }
    }
    refuses(
        "target_parameters",
        json!({"target_parameters": "mlp.experts.gate_up_proj"}),
        &["a list of names"],
    );
    for value in [
        json!("0"),
        json!([0, "1"]),
        json!(1.5),
        json!(true),
        json!({}),
    ] {
        refuses(
            "layers_to_transform",
            json!({ "layers_to_transform": value }),
            &["layer index"],
        );
    }
    for value in [json!(3), json!([3])] {
        refuses(
            "layers_pattern",
            json!({ "layers_pattern": value }),
            &["is "],
        );
    }
    refuses(
        "layers_pattern",
        json!({ "layers_pattern": vec!["layers"; 65] }),
        &["65"],
    );
}

#[test]
fn every_form_of_target_modules_loads() {
    let targets = |value: Value| loads(json!({ "target_modules": value }));
    assert_eq!(
        targets(json!([])).target_modules(),
        Some(&TargetModules::List(vec![]))
    );
    assert_eq!(
        targets(json!("All-Linear")).target_modules(),
        Some(&TargetModules::AllLinear)
    );
    assert_eq!(
        targets(json!("(?!x)x")).target_modules(),
        Some(&TargetModules::Regex("(?!x)x".to_owned()))
    );
    let absent = targets(json!(null));
    assert_eq!(absent.target_modules(), None);
    assert_eq!(absent.targets("model.x"), TargetMatch::Unchecked);
    let all = targets(json!("all-linear"));
    assert_eq!(all.targets("model.layers.0.mlp.up_proj"), TargetMatch::Yes);
    assert_eq!(all.targets("lm_head"), TargetMatch::No);
}

#[test]
fn a_regex_that_only_python_evaluates_is_unchecked_with_a_warning() {
    let config = loads(json!({"target_modules": "(?a).*q_proj"}));
    assert_eq!(config.targets("model.q_proj"), TargetMatch::Unchecked);
    assert_eq!(config.warnings().len(), 1);
    assert_eq!(config.warnings()[0].reason, "unchecked-regex");
    assert_eq!(config.warnings()[0].level, FindingLevel::Warning);
    assert!(config.warnings()[0].message.contains("(?a).*q_proj"));

    let excluded = loads(json!({"exclude_modules": "(?a)k_proj"}));
    assert_eq!(excluded.targets("model.q_proj"), TargetMatch::Unchecked);
    assert_eq!(excluded.targets("model.v_proj"), TargetMatch::No);

    let layers = loads(json!({"layers_to_transform": [0], "layers_pattern": "(?a)layers"}));
    assert_eq!(
        layers.targets("model.layers.0.q_proj"),
        TargetMatch::Unchecked
    );

    let slow = loads(json!({"target_modules": r"(?=x)((x+)+)+\2y"}));
    assert!(slow.warnings().is_empty());
    assert_eq!(slow.targets(&"x".repeat(64)), TargetMatch::Unchecked);
}

#[test]
fn modules_to_save_are_vocabulary_tables() {
    refuses(
        "modules_to_save",
        json!({"modules_to_save": ["norm", "lm_head", "input_layernorm"]}),
        &[
            "\"norm\"",
            "\"input_layernorm\"",
            "embed_tokens and lm_head",
        ],
    );
    refuses(
        "modules_to_save",
        json!({"modules_to_save": ["classifier", "score"]}),
        &["\"score\"", "SEQ_CLS"],
    );
    refuses(
        "modules_to_save",
        json!({"modules_to_save": "lm_head"}),
        &["list of names"],
    );
    let config = loads(json!({"modules_to_save": ["model.embed_tokens", "lm_head"]}));
    let tables: Vec<(&str, TokenTable)> = config
        .modules_to_save()
        .iter()
        .map(|saved| (saved.name.as_str(), saved.table))
        .collect();
    assert_eq!(
        tables,
        [
            ("model.embed_tokens", TokenTable::Embed),
            ("lm_head", TokenTable::LmHead)
        ]
    );
}

#[test]
fn token_ids_are_distinct_u32() {
    const FIELD: &str = "trainable_token_indices";
    for (value, says) in [
        (json!([1, -1]), "[1] is -1"),
        (json!([4294967296_u64]), "4294967296"),
        (json!([1.0]), "1.0"),
        (json!(["1"]), "\"1\""),
        (json!([true]), "true"),
        (json!([3, 1, 3]), "[2] is 3"),
        (json!(7), "is 7"),
        (json!({"embed_tokens": 7}), "[\"embed_tokens\"] is 7"),
        (
            json!({"embed_tokens": [5, 5]}),
            "[\"embed_tokens\"][1] is 5",
        ),
        (json!({"layers.0.mlp": [1]}), "names no vocabulary table"),
        (json!({"a.lm_head": [1], "lm_head": [2]}), "a second time"),
    ] {
        refuses(FIELD, json!({ FIELD: value }), &[says]);
    }
}

#[test]
fn token_ids_keep_their_order() {
    let tokens = |value: Value| {
        loads(json!({ "trainable_token_indices": value }))
            .trainable_tokens()
            .cloned()
    };
    assert_eq!(
        tokens(json!([9, 1, 4294967295_u32])),
        Some(TrainableTokens {
            embed: Some(vec![9, 1, u32::MAX]),
            lm_head: None,
            bare_list: true
        })
    );
    assert_eq!(
        tokens(json!({"model.embed_tokens": [3, 2], "lm_head": [1]})),
        Some(TrainableTokens {
            embed: Some(vec![3, 2]),
            lm_head: Some(vec![1]),
            bare_list: false
        })
    );
    for empty in [json!(null), json!([]), json!({}), json!({"lm_head": []})] {
        assert_eq!(tokens(empty), None);
    }
}

#[test]
fn lora_b_layout_is_one_of_two() {
    let layout = |name: Value| loads(json!({ "lora_B_layout": name })).lora_b_layout();
    assert_eq!(layout(json!("rank_major")), Some(LoraBLayout::RankMajor));
    assert_eq!(
        layout(json!("grouped_by_expert")),
        Some(LoraBLayout::GroupedByExpert)
    );
    assert_eq!(layout(json!(null)), None);
    refuses(
        "lora_B_layout",
        json!({"lora_B_layout": "sideways"}),
        &["sideways", "rank_major"],
    );
}

#[test]
fn peft_version_is_read_or_warned_about() {
    let version = |value: Value| loads(json!({ "peft_version": value }));
    assert_eq!(
        version(json!("0.18.1")).peft_version(),
        Some(PeftVersion::release(0, 18, 1))
    );
    for odd in [json!("main"), json!(18)] {
        let config = version(odd);
        assert_eq!(config.peft_version(), None);
        assert_eq!(config.warnings()[0].reason, "peft-version-unknown");
    }
    assert!(version(json!(null)).warnings().is_empty());
}

#[test]
fn declared_buffers_are_named_and_not_refused() {
    assert_eq!(
        loads(json!({})).declares_buffers(),
        DeclaredBuffers::default()
    );
    let config = loads(json!({"velora_config": {"num_groups": 4}, "monteclora_config": null}));
    assert_eq!(
        config.declares_buffers(),
        DeclaredBuffers {
            velora: true,
            monteclora: false
        }
    );
}
