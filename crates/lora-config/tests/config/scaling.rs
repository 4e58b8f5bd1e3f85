//! Rank, alpha, scale and targets of a module: against PEFT's recorded values and Python's own matching.

use crate::common::{cases, parse, read_json, with};
use lora_config::{ParseOptions, TargetMatch, parse_peft_adapter_config};
use serde_json::{Value, json};

fn python_re() -> Value {
    serde_json::from_str(include_str!("../data/python_re.json")).unwrap()
}

fn texts(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item.as_str().unwrap())
        .collect()
}

#[test]
fn modules_have_the_numbers_that_peft_recorded() {
    let assume_base = ParseOptions {
        assume_base: true,
        ..ParseOptions::default()
    };
    let mut checked = 0;
    for (name, folder) in cases() {
        let Ok(text) = std::fs::read_to_string(folder.join("adapter/adapter_config.json")) else {
            continue;
        };
        let Ok(config) = parse_peft_adapter_config(&text, &assume_base) else {
            continue;
        };
        let case = read_json(&folder.join("case.json"));
        let refused = case["expect"].as_str().unwrap().starts_with("refuse");
        for module in case["modules"].as_array().into_iter().flatten() {
            let (Some(r), Some(scaling)) = (module["r"].as_u64(), module["scaling"].as_f64())
            else {
                continue;
            };
            let mut path = module["module"].as_str().unwrap().to_owned();
            if let Some(parameter) = module["parameter"].as_str() {
                path = format!("{path}.{parameter}");
            }
            let found = config.module(&path);
            // Files damaged after they were saved may state other numbers than their tensors were trained with.
            if refused && u64::from(found.rank) != r {
                continue;
            }
            assert_eq!(u64::from(found.rank), r, "{name}: rank of {path}");
            assert_eq!(found.scaling, scaling as f32, "{name}: scale of {path}");
            assert_eq!(
                found.alpha,
                module["alpha"].as_f64().unwrap(),
                "{name}: alpha of {path}"
            );
            assert_eq!(config.undecided_pattern(&path), None);
            checked += 1;
        }
    }
    assert!(checked > 200, "{checked} modules");
}

#[test]
fn keys_match_as_pythons_re_does() {
    let data = python_re();
    let paths = texts(&data["paths"]);
    for entry in data["keys"].as_array().unwrap() {
        let key = entry["key"].as_str().unwrap();
        let expected = texts(&entry["matches"]);
        let config = parse(&with(
            json!({"rank_pattern": {key: 2}, "alpha_pattern": {key: 3}}),
        ));
        let config = config.unwrap_or_else(|error| panic!("{key}: {error}"));
        for path in &paths {
            let matches = expected.contains(path);
            assert_eq!(
                config.rank_keys_matching(path).count() == 1,
                matches,
                "{key:?} on {path}"
            );
            assert_eq!(config.alpha_keys_matching(path).count() == 1, matches);
            let found = config.module(path);
            let wanted = if matches { (2, 3.0) } else { (4, 8.0) };
            assert_eq!((found.rank, found.alpha), wanted, "{key:?} on {path}");
        }
    }
}

#[test]
fn targets_are_those_that_peft_finds() {
    let data = python_re();
    for entry in data["targets"].as_array().unwrap() {
        let mut changes = entry["config"].clone();
        let fields = changes.as_object_mut().unwrap();
        fields.entry("target_modules").or_insert(Value::Null);
        let config = parse(&with(changes)).unwrap();
        let expected = texts(&entry["matches"]);
        for path in texts(&data["paths"]) {
            let wanted = if expected.contains(&path) {
                TargetMatch::Yes
            } else {
                TargetMatch::No
            };
            assert_eq!(
                config.targets(path),
                wanted,
                "{} on {path}",
                entry["config"]
            );
        }
    }
}

#[test]
fn the_first_key_in_file_order_decides() {
    // As text, since a JSON library may order keys.
    let config = |table: &str| {
        let text = format!(
            r#"{{"peft_type":"LORA","r":4,"lora_alpha":8,"use_rslora":false,"alpha_pattern":{table}}}"#
        );
        parse_peft_adapter_config(&text, &ParseOptions::default()).unwrap()
    };
    let path = "model.layers.1.self_attn.q_proj";
    let general_first = config(r#"{"q_proj":2,"layers.1.self_attn.q_proj":32}"#);
    assert_eq!(general_first.module(path).alpha, 2.0);
    assert_eq!(
        general_first.alpha_keys_matching(path).collect::<Vec<_>>(),
        [0, 1]
    );
    let special_first = config(r#"{"layers.1.self_attn.q_proj":32,"q_proj":2}"#);
    assert_eq!(special_first.module(path).alpha, 32.0);
    assert_eq!(
        special_first.alpha_pattern()[0].0,
        "layers.1.self_attn.q_proj"
    );
}

#[test]
fn rank_and_alpha_pick_their_keys_apart() {
    let config = parse(&with(json!({
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 6},
    })))
    .unwrap();
    let module = config.module("model.layers.0.self_attn.q_proj");
    assert_eq!((module.rank, module.alpha, module.scaling), (2, 6.0, 3.0));
    let other = config.module("model.layers.1.self_attn.q_proj");
    assert_eq!((other.rank, other.alpha, other.scaling), (2, 8.0, 4.0));
}

#[test]
fn the_scale_is_computed_in_f64_and_rounded_once() {
    let scaling = |r: u32, alpha: f64, rslora: bool| {
        parse(&with(
            json!({"r": r, "lora_alpha": alpha, "use_rslora": rslora}),
        ))
        .unwrap()
        .scaling("q_proj")
    };
    assert_eq!(scaling(3, 16.0, false), (16.0_f64 / 3.0) as f32);
    assert_eq!(scaling(8, 11.313708498984761, true), 4.0);
    assert_eq!(scaling(7, 16.0, true), (16.0 / 7.0_f64.sqrt()) as f32);
    assert_eq!(scaling(1, f64::from(f32::MAX), true), f32::MAX);
}

#[test]
fn a_key_that_equals_the_path_counts_even_if_its_expression_does_not_match() {
    let config = parse(&with(json!({"rank_pattern": {"odd$name": 2}}))).unwrap();
    assert_eq!(config.module("odd$name").rank, 2);
}

#[test]
fn a_match_that_is_given_up_is_reported() {
    let slow = r"(?=x)((x+)+)+\2y";
    let config = parse(&with(json!({"alpha_pattern": {"a": 1, slow: 2, "b": 3}}))).unwrap();
    let path = "x".repeat(64);
    assert_eq!(
        config.undecided_pattern(&path),
        Some(("alpha_pattern", slow))
    );
    assert_eq!(config.module(&path).alpha, 8.0);
    assert_eq!(
        config.undecided_pattern("a"),
        None,
        "an earlier key decides"
    );
    assert_eq!(config.undecided_pattern("q_proj"), None);
}
