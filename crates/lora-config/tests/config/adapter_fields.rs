//! One refusal for each field that can be refused; targets, tables and layouts are in `adapter_targets`.

use crate::common::{loads, parse, parse_with, plain, refuses, rejected, with};
use lora_config::{ParseOptions, parse_peft_adapter_config, validate_peft_config};
use serde_json::{Value, json};

#[test]
fn peft_type_is_lora_in_upper_case() {
    refuses("peft_type", json!({"peft_type": "<absent>"}), &["missing"]);
    refuses("peft_type", json!({"peft_type": null}), &["missing"]);
    for other in ["lora", "LOHA", "ADALORA", "TRAINABLE_TOKENS"] {
        refuses(
            "peft_type",
            json!({"peft_type": other}),
            &[other, "\"LORA\""],
        );
    }
}

#[test]
fn another_methods_fields_are_not_refused_one_by_one() {
    let config =
        json!({"peft_type": "TRAINABLE_TOKENS", "token_indices": [1], "init_weights": true});
    assert_eq!(rejected(parse(&config)).len(), 1);
}

#[test]
fn r_is_a_positive_integer() {
    for (value, says) in [
        (json!(0), "is 0"),
        (json!(-4), "is -4"),
        (json!(4.0), "4.0"),
        (json!("8"), "\"8\""),
        (json!(true), "true"),
        (json!(null), "null"),
        (json!([4]), "[4]"),
        (json!(2_000_000), "2000000"),
        (json!(1e30), "1e30"),
    ] {
        refuses("r", json!({ "r": value }), &[says]);
    }
}

#[test]
fn lora_alpha_is_a_finite_number() {
    for (value, says) in [
        (json!(null), "null"),
        (json!("8"), "\"8\""),
        (json!(true), "true"),
        (json!(1e300), "1e300"),
    ] {
        refuses("lora_alpha", json!({ "lora_alpha": value }), &[says]);
    }
    for number in ["NaN", "Infinity", "-Infinity"] {
        let text = plain()
            .to_string()
            .replace("\"lora_alpha\":8", &format!("\"lora_alpha\":{number}"));
        let findings = rejected(parse_peft_adapter_config(&text, &ParseOptions::default()));
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].reason, "config-lora_alpha");
    }
    assert_eq!(
        loads(json!({"lora_alpha": 11.313708498984761})).alpha(),
        11.313708498984761
    );
}

#[test]
fn an_absent_scale_is_not_guessed_unless_defaults_may_be_taken() {
    for field in ["r", "lora_alpha", "use_rslora"] {
        refuses(
            field,
            json!({ field: "<absent>" }),
            &["assume_peft_defaults", "--assume-peft-defaults"],
        );
    }
    refuses("use_rslora", json!({"use_rslora": null}), &["absent"]);
    let bare = json!({"peft_type": "LORA", "target_modules": ["q_proj"]});
    assert_eq!(rejected(parse(&bare)).len(), 3);
    let assume = ParseOptions {
        assume_peft_defaults: true,
        ..ParseOptions::default()
    };
    let config = parse_with(assume, &bare).unwrap();
    assert_eq!(
        (config.r(), config.alpha(), config.use_rslora()),
        (8, 8.0, false)
    );
    // A value that is there and wrong is not a default.
    assert_eq!(
        rejected(parse_with(assume, &with(json!({"lora_alpha": null})))).len(),
        1
    );
}

#[test]
fn flags_are_booleans() {
    for field in [
        "use_rslora",
        "use_dora",
        "lora_bias",
        "use_qalora",
        "ensure_weight_tying",
    ] {
        for value in [json!(1), json!("true"), json!([true])] {
            refuses(field, json!({ field: value }), &["true or false"]);
        }
    }
}

#[test]
fn settings_that_change_the_math_and_are_not_applied_are_refused_when_on() {
    for (field, on) in [
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("use_qalora", json!(true)),
        ("bias", json!("all")),
        ("bias", json!("lora_only")),
        ("bias", json!("some")),
        ("bias", json!(true)),
        ("kasa_config", json!({"beta": 0.1})),
        ("kasa_config", json!({})),
        ("use_bdlora", json!({"nblocks": 2})),
        ("use_bdlora", json!({})),
        ("use_bdlora", json!(true)),
        ("arrow_config", json!({"arrow_top_k": 3})),
        ("megatron_config", json!({"tensor_model_parallel_size": 2})),
        ("alora_invocation_tokens", json!([7, 2])),
        ("layer_replication", json!([[0, 2], [0, 2]])),
        ("enable_lora", json!([true, false, true])),
    ] {
        refuses(field, json!({ field: on }), &[field]);
        loads(json!({ field: null }));
        loads(json!({ field: "<absent>" }));
    }
    for (field, off) in [
        ("use_dora", json!(false)),
        ("lora_bias", json!(false)),
        ("use_qalora", json!(false)),
        ("bias", json!("none")),
        ("alora_invocation_tokens", json!([])),
        ("layer_replication", json!([])),
        ("use_bdlora", json!(false)),
    ] {
        loads(json!({ field: off }));
    }
}

#[test]
fn an_initialisation_that_changes_the_base_needs_the_callers_word() {
    let assume = ParseOptions {
        assume_base: true,
        ..ParseOptions::default()
    };
    for name in [
        "pissa",
        "pissa_niter_16",
        "PiSSA",
        "olora",
        "OLoRA",
        "corda",
        "lora_ga",
        "loftq",
        "of_the_future",
    ] {
        let changes = json!({ "init_lora_weights": name });
        refuses(
            "init_lora_weights",
            changes.clone(),
            &["assume_base", "--assume-base"],
        );
        parse_with(assume, &with(changes)).unwrap();
    }
    refuses(
        "init_lora_weights",
        json!({"init_lora_weights": 3}),
        &["is 3"],
    );
    for name in [
        json!(true),
        json!(false),
        json!(null),
        json!("gaussian"),
        json!("orthogonal"),
        json!("mica"),
        json!("eva"),
    ] {
        loads(json!({ "init_lora_weights": name }));
    }
}

#[test]
fn a_pattern_table_maps_names_to_numbers() {
    for field in ["rank_pattern", "alpha_pattern"] {
        refuses(field, json!({ field: ["q_proj"] }), &["a list"]);
        refuses(
            field,
            json!({ field: {"q_proj": "2"} }),
            &["q_proj", "\"2\""],
        );
        refuses(field, json!({ field: {"q_proj": null} }), &["null"]);
        refuses(
            field,
            json!({ field: {"(q_proj": 2} }),
            &["(q_proj", "cannot be evaluated"],
        );
        let many: serde_json::Map<String, Value> = (0..300)
            .map(|index| (format!("(q|k)_{index}"), json!(2)))
            .collect();
        refuses(field, json!({ field: many }), &["256"]);
        loads(json!({ field: null }));
    }
    refuses(
        "rank_pattern",
        json!({"rank_pattern": {"a": 0, "b": -1, "c": 1.5, "d": 2}}),
        &["[\"a\"] is 0", "[\"b\"] is -1", "[\"c\"] is 1.5"],
    );
    refuses(
        "alpha_pattern",
        json!({"alpha_pattern": {"a": 1e39}}),
        &["[\"a\"] is 1e39"],
    );
}

#[test]
fn a_long_list_of_problems_is_cut_and_counted() {
    let many: serde_json::Map<String, Value> = (0..5000)
        .map(|index| (format!("m{index}"), json!(0)))
        .collect();
    let findings = rejected(parse(&with(json!({ "rank_pattern": many }))));
    assert!(findings[0].message.len() < 1000 && findings[0].message.contains("and 4992 more"));
}

#[test]
fn an_alpha_that_is_not_positive_loads_with_a_warning() {
    for changes in [
        json!({"lora_alpha": 0}),
        json!({"lora_alpha": -2.5}),
        json!({"alpha_pattern": {"q_proj": 0}}),
    ] {
        let config = loads(changes);
        assert_eq!(config.warnings()[0].reason, "alpha-not-positive");
    }
    assert!(loads(json!({})).warnings().is_empty());
}

#[test]
fn fields_without_effect_on_inference_are_ignored() {
    let config = loads(json!({
        "task_type": "anything", "auto_mapping": {"a": 1}, "base_model_name_or_path": "x", "revision": "y",
        "inference_mode": false, "lora_dropout": 0.3, "fan_in_fan_out": true, "merge_weights": true,
        "megatron_core": "megatron.core", "eva_config": {"rho": 2}, "corda_config": {"x": 1},
        "lora_ga_config": {"x": 1}, "loftq_config": {"x": 1}, "qalora_group_size": 16, "runtime_config": {"x": true},
    }));
    assert!(config.warnings().is_empty());
}

#[test]
fn an_unknown_field_is_refused_when_it_is_set() {
    for value in [
        json!(true),
        json!(0),
        json!(1.5),
        json!("x"),
        json!([0]),
        json!({"a": null}),
    ] {
        refuses(
            "some_new_field",
            json!({ "some_new_field": value }),
            &["some_new_field is ", "set it to null"],
        );
    }
    for unset in [json!(null), json!(false), json!(""), json!([]), json!({})] {
        loads(json!({ "some_new_field": unset }));
    }
}

#[test]
fn every_refused_field_is_reported_at_once() {
    let findings = rejected(parse(&with(json!({
        "r": 0, "lora_alpha": null, "use_dora": true, "bias": "all", "modules_to_save": ["norm"],
        "rank_pattern": {"a": 0}, "new": 1, "init_lora_weights": "pissa", "trainable_token_indices": [-1],
    }))));
    let mut reasons: Vec<&str> = findings.iter().map(|f| f.reason.as_str()).collect();
    reasons.sort_unstable();
    assert_eq!(
        reasons,
        [
            "config-bias",
            "config-init_lora_weights",
            "config-lora_alpha",
            "config-modules_to_save",
            "config-new",
            "config-r",
            "config-rank_pattern",
            "config-trainable_token_indices",
            "config-use_dora",
        ]
    );
}

#[test]
fn a_flood_of_unknown_fields_is_bounded() {
    let flood: serde_json::Map<String, Value> = (0..10_000)
        .map(|index| (format!("f{index}"), json!(1)))
        .collect();
    let findings = rejected(parse(&with(Value::Object(flood))));
    assert_eq!(findings.len(), 65);
    assert!(findings[64].message.contains("9936 more"));
}

#[test]
fn repeated_keys_are_refused_at_any_depth() {
    let parse = |text: &str| {
        rejected(parse_peft_adapter_config(text, &ParseOptions::default()))
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let base = r#""peft_type":"LORA","lora_alpha":8,"use_rslora":false"#;
    let findings = parse(&format!(r#"{{{base},"r":4,"r":8}}"#));
    assert_eq!(findings.len(), 1);
    assert!(
        findings[0].starts_with("REJECT[config-duplicate-key]: \"r\" "),
        "{findings:?}"
    );
    let nested = parse(&format!(
        r#"{{{base},"r":4,"rank_pattern":{{"q":1,"q":2}}}}"#
    ));
    assert!(nested[0].contains("\"rank_pattern.q\""), "{nested:?}");
}

#[test]
fn a_text_that_is_no_object_is_refused() {
    for text in [
        "",
        "{",
        "{not json",
        "[]",
        "null",
        "\"x\"",
        "{\"r\": 4,}",
        "\u{feff}{}",
    ] {
        let findings = rejected(parse_peft_adapter_config(text, &ParseOptions::default()));
        assert_eq!(findings[0].reason, "config-not-json", "{text:?}");
        assert!(findings[0].message.starts_with("adapter_config.json: "));
    }
}

#[test]
fn ranks_are_checked_against_the_pool() {
    let config = loads(json!({"r": 64, "rank_pattern": {"a": 8, "b": 200}}));
    validate_peft_config(&config, 200).unwrap();
    let error = validate_peft_config(&config, 63).unwrap_err().to_string();
    assert!(
        error.contains("REJECT[rank-exceeds-pool]: r is 64")
            && error.contains("rank_pattern[\"b\"] is 200"),
        "{error}"
    );
}
