//! `lora verify` on real adapters: what must pass passes, and what is off is seen.

use lora_tests::{CaseCopy, case_dir, has_cuda, index, lora};

/// Loaded only with something that this version does not apply, and refused by this reason.
const NOT_APPLIED: [(&str, &str); 9] = [
    ("qwen3_vl_names", "non-layer-module"),
    ("gpt2_conv1d", "model-config"),
    ("qwen2_lora_bias", "config-lora_bias"),
    ("llama_embed_lmhead", "lora-embedding-unimplemented"),
    (
        "llama_embed_lmhead_base_saved",
        "lora-embedding-unimplemented",
    ),
    ("gemma3_scaled_embedding", "lora-embedding-unimplemented"),
    ("llama_tied_lmhead_lora", "lm-head-lora-unimplemented"),
    ("llama_tied_both_lora", "lora-embedding-unimplemented"),
    ("llama_f64_tensors", "unsupported-dtype"),
];

fn argument(name: &str) -> String {
    case_dir(name).display().to_string()
}

/// Everything that this version can apply, on.
fn verify(case: &str, more: &[&str]) -> lora_tests::CommandOutput {
    let mut arguments = vec!["verify", "--json", "--enable", "all", "--experts"];
    arguments.extend(more);
    arguments.push(case);
    lora(&arguments)
}

/// Verifies every case that this version applies and gives the number of modules compared.
fn verify_every_ok_case(backend: &str) -> usize {
    let mut compared = 0;
    for case in index().into_iter().filter(|case| case.is_ok()) {
        if NOT_APPLIED.iter().any(|(name, _)| *name == case.name) {
            continue;
        }
        let mut more = vec!["--backend", backend];
        if case.name == "name_no_prefix" {
            more.push("--accept-bare-names");
        }
        let output = verify(&argument(&case.name), &more);
        assert_eq!(
            output.code, 0,
            "{}: {}{}",
            case.name, output.out, output.err
        );
        compared += output.json()["cases"][0]["modules"]
            .as_array()
            .map_or(0, Vec::len);
    }
    compared
}

#[test]
fn every_ok_case_that_this_version_applies_matches_peft() {
    let compared = verify_every_ok_case("host");
    assert!(compared > 240, "only {compared} modules were compared");
}

#[test]
fn every_ok_case_matches_peft_on_cuda_alone_and_mixed() {
    if !has_cuda("every_ok_case_matches_peft_on_cuda_alone_and_mixed") {
        return;
    }
    assert!(verify_every_ok_case("cuda") > 240);
    let cases = ["llama_plain", "llama_rslora", "llama_patterns"].map(argument);
    let mut arguments = vec!["verify", "--mixed", "--backend", "cuda"];
    arguments.extend(cases.iter().map(String::as_str));
    let output = lora(&arguments);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
}

#[test]
fn mixed_batch_of_different_adapters_matches_peft_and_leaves_base_rows_alone() {
    let names = [
        "llama_plain",
        "llama_rslora",
        "llama_patterns",
        "llama_all_linear",
        "name_default_infix",
    ];
    let cases: Vec<String> = names.map(argument).into();
    let mut arguments = vec!["verify", "--mixed", "--json"];
    arguments.extend(cases.iter().map(String::as_str));
    let output = lora(&arguments);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    let json = output.json();
    assert!(json["base_rows"]["rows"].as_u64().expect("a number") > 50);
    assert_eq!(json["base_rows"]["changed"], 0);
    let worst = json["worst"].as_f64().expect("a number");
    assert!(worst > 0.0 && worst <= 1.0, "{worst}");
}

#[test]
fn mixed_batch_of_expert_adapters_matches_peft_expert_by_expert() {
    let names = [
        "qwen3_moe_params",
        "qwen3_moe_v4_per_expert",
        "qwen3_moe_v4_rslora",
    ];
    let cases: Vec<String> = names.map(argument).into();
    let mut arguments = vec!["verify", "--mixed", "--json", "--experts"];
    arguments.extend(cases.iter().map(String::as_str));
    let output = lora(&arguments);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    let json = output.json();
    assert_eq!(json["base_rows"]["changed"], 0);
    for case in json["cases"].as_array().expect("a list") {
        let modules = case["modules"].as_array().expect("a list");
        assert!(
            modules.iter().any(|module| module["expert"] == 2),
            "{}",
            case["case"]
        );
    }
}

#[test]
fn every_case_of_one_base_gives_the_same_alone_and_in_a_mixed_batch() {
    let names = ["llama_plain", "llama_rslora", "llama_patterns"];
    let cases: Vec<String> = names.map(argument).into();
    let modules = |arguments: &[&str]| lora(arguments).json()["cases"].clone();
    let mut mixed = vec!["verify", "--json", "--mixed"];
    mixed.extend(cases.iter().map(String::as_str));
    let together = modules(&mixed);
    for (at, case) in cases.iter().enumerate() {
        assert_eq!(
            modules(&["verify", "--json", case])[0],
            together[at],
            "{case}"
        );
    }
}

#[test]
fn alpha_off_by_five_percent_is_seen() {
    for name in ["llama_plain", "llama_rslora", "llama_patterns"] {
        let case = CaseCopy::of(name);
        assert_eq!(verify(&case.argument(), &[]).code, 0, "{name} as recorded");
        case.edit_config(|config| {
            let scaled =
                |alpha: &serde_json::Value| (alpha.as_f64().expect("a number") * 1.05).into();
            config["lora_alpha"] = scaled(&config["lora_alpha"]);
            for alpha in config["alpha_pattern"]
                .as_object_mut()
                .into_iter()
                .flat_map(|patterns| patterns.values_mut())
            {
                *alpha = scaled(alpha);
            }
        });
        let output = verify(&case.argument(), &[]);
        assert_eq!(output.code, 1, "{name}");
        assert!(
            output.json()["worst"].as_f64().expect("a number") > 1.0,
            "{name}"
        );
    }
}

#[test]
fn two_swapped_rows_are_seen() {
    for name in ["llama_plain", "qwen3_moe_v4_per_expert"] {
        let case = CaseCopy::of(name);
        case.edit_golden("proj|out", |shape, values| {
            let width = shape[1];
            let (first, second) = values.split_at_mut(width);
            first.swap_with_slice(&mut second[..width]);
        });
        assert_eq!(verify(&case.argument(), &[]).code, 1, "{name}");
    }
}

#[test]
fn shifted_golden_is_seen() {
    let case = CaseCopy::of("llama_plain");
    case.edit_golden("q_proj|out", |_, values| values.rotate_right(1));
    let output = verify(&case.argument(), &[]);
    assert_eq!(output.code, 1);
    let json = output.json();
    let modules = json["cases"][0]["modules"].as_array().expect("a list");
    for module in modules {
        let missed = module["worst"].as_f64().expect("a number") > 1.0;
        assert_eq!(missed, module["module"] == "self_attn.q_proj", "{module}");
    }
}

#[test]
fn swapped_stacked_expert_is_seen() {
    let case = CaseCopy::of("qwen3_moe_params");
    assert_eq!(verify(&case.argument(), &[]).code, 0);
    case.edit_golden("down_proj|w_adapted", |shape, values| {
        let expert = shape[1] * shape[2];
        let (first, second) = values.split_at_mut(expert);
        first.swap_with_slice(&mut second[..expert]);
    });
    assert_eq!(verify(&case.argument(), &[]).code, 1);
}

#[test]
fn whole_expert_blocks_match_peft_unsorted_and_sorted_by_expert() {
    for name in [
        "qwen3_moe_params",
        "qwen3_moe_v4_per_expert",
        "qwen3_5_moe_mixed",
        "mixtral_params",
        "llama4_params",
    ] {
        let output = verify(&argument(name), &[]);
        assert_eq!(output.code, 0, "{name}: {}", output.out);
        let json = output.json();
        let modules = json["cases"][0]["modules"].as_array().expect("a list");
        let block = modules.iter().find(|module| module["module"] == "experts");
        let worst = block.and_then(|block| block["worst"].as_f64());
        assert!(
            worst.is_some_and(|worst| worst > 0.0 && worst < 1.0),
            "{name}: {worst:?}"
        );
    }
}

#[test]
fn two_swapped_tokens_of_a_block_are_seen_in_the_block_alone() {
    let case = CaseCopy::of("qwen3_moe_params");
    case.edit_golden("mlp.experts|out", |shape, values| {
        let (first, second) = values.split_at_mut(shape[1]);
        first.swap_with_slice(&mut second[..shape[1]]);
    });
    let output = verify(&case.argument(), &[]);
    assert_eq!(output.code, 1);
    let json = output.json();
    let modules = json["cases"][0]["modules"].as_array().expect("a list");
    for module in modules {
        let missed = module["worst"].as_f64().expect("a number") > 1.0;
        assert_eq!(missed, module["module"] == "experts", "{module}");
    }
}

#[test]
fn case_without_recorded_outputs_has_nothing_to_compare() {
    let case = CaseCopy::of("llama_plain");
    std::fs::remove_file(case.path().join("golden.safetensors")).expect("file is removed");
    let output = lora(&["verify", &case.argument()]);
    assert_eq!(output.code, 0);
    assert!(output.out.contains("nothing to compare"), "{}", output.out);
}

#[test]
fn what_this_version_does_not_apply_is_refused_by_name() {
    for (name, reason) in NOT_APPLIED {
        let output = lora(&[
            "audit",
            "--json",
            "--enable",
            "all",
            "--experts",
            "--model",
            &case_dir(name).join("config.json").display().to_string(),
            &case_dir(name).join("adapter").display().to_string(),
        ]);
        assert_eq!(output.code, 1, "{name}");
        assert!(
            output.error_reasons().iter().any(|found| found == reason),
            "{name}: {:?}",
            output.error_reasons()
        );
        assert_eq!(verify(&argument(name), &[]).code, 1, "{name}");
    }
}

#[test]
fn unreadable_case_is_named_and_does_not_keep_others_from_being_compared() {
    let output = lora(&[
        "verify",
        "--mixed",
        "/no/such/case",
        &argument("llama_plain"),
        &argument("gpt2_conv1d"),
    ]);
    assert_eq!(output.code, 1);
    assert!(
        output.out.contains("REJECT[model-config]")
            && output.out.contains("/no/such/case/config.json"),
        "{}",
        output.out
    );
    assert!(output.out.contains("worst element"), "{}", output.out);
}

#[test]
fn damaged_golden_fails_its_case_and_the_others_are_compared() {
    let case = CaseCopy::of("llama_plain");
    std::fs::write(case.path().join("golden.safetensors"), b"no").expect("file is written");
    let other = argument("llama_rslora");
    let output = lora(&["verify", "--mixed", &case.argument(), &other]);
    assert_eq!(output.code, 1);
    let named = output.out.lines().find(|l| l.starts_with("not compared: "));
    let named = named.unwrap_or_else(|| panic!("{}", output.out));
    assert!(named.contains("golden.safetensors"), "{named}");

    let output = lora(&["verify", "--mixed", "--json", &case.argument(), &other]);
    let cases = &output.json()["cases"];
    assert_eq!(
        (&cases[0]["ok"], &cases[1]["ok"]),
        (&false.into(), &true.into())
    );
    assert_eq!(cases[0]["modules"], serde_json::json!([]));
    assert!(!cases[1]["modules"].as_array().expect("a list").is_empty());
}

#[test]
fn cuda_runs_or_says_what_is_missing() {
    let output = lora(&["verify", "--backend", "cuda", &argument("llama_plain")]);
    if output.code != 0 {
        assert_eq!(output.err.lines().count(), 1, "{}", output.err);
        assert!(
            output.err.contains("host"),
            "the way out is not named: {}",
            output.err
        );
    }
}
