//! `lora audit` and `lora verify` on adapters that override rows of the vocabulary.

use lora_tests::{CaseCopy, CommandOutput, case_dir, has_cuda, lora, read_f32};
use serde_json::Value;

/// Cases whose tables are recorded, and the tables.
const RECORDED: [(&str, &[&str]); 3] = [
    ("llama_tokens_unsorted", &["model.embed_tokens"]),
    ("llama_modules_to_save", &["model.embed_tokens", "lm_head"]),
    (
        "name_legacy_modules_to_save",
        &["model.embed_tokens", "lm_head"],
    ),
];

fn argument(name: &str) -> String {
    case_dir(name).display().to_string()
}

fn verify(case: &str, more: &[&str]) -> CommandOutput {
    let mut arguments = vec!["verify", "--json"];
    arguments.extend(more);
    arguments.push(case);
    lora(&arguments)
}

/// Distance over tolerance of the module at `path` in the first case.
fn worst(json: &Value, path: &str) -> f64 {
    let modules = json["cases"][0]["modules"].as_array().expect("a list");
    let module = modules.iter().find(|module| module["path"] == path);
    let module = module.unwrap_or_else(|| panic!("{path} is not compared: {json}"));
    module["worst"].as_f64().expect("a number")
}

fn recorded_tables_match_peft(backend: &str) {
    for (case, tables) in RECORDED {
        let output = verify(&argument(case), &["--backend", backend]);
        assert_eq!(output.code, 0, "{case}: {}{}", output.out, output.err);
        let json = output.json();
        for table in tables {
            assert!(worst(&json, table) <= 1.0, "{case}: {table}");
        }
        assert_eq!(json["base_rows"]["changed"], 0, "{case}");
    }
    let cases = ["llama_plain", "llama_resized_vocab"].into_iter();
    let cases: Vec<String> = cases
        .chain(RECORDED.map(|(case, _)| case))
        .map(argument)
        .collect();
    let mut arguments = vec!["verify", "--json", "--mixed", "--backend", backend];
    arguments.extend(cases.iter().map(String::as_str));
    let output = lora(&arguments);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    assert_eq!(output.json()["base_rows"]["changed"], 0);
}

#[test]
fn recorded_rows_and_logits_match_peft_alone_and_mixed() {
    recorded_tables_match_peft("host");
}

#[test]
fn recorded_rows_and_logits_match_peft_on_cuda() {
    if has_cuda("recorded_rows_and_logits_match_peft_on_cuda") {
        recorded_tables_match_peft("cuda");
    }
}

#[test]
fn audit_says_what_an_overlay_takes_and_replaces() {
    for (case, embed, head, bytes) in [
        ("llama_tokens_unsorted", 3, 0, 3 * 64),
        ("llama_modules_to_save", 48, 48, 2 * 48 * 64),
        ("llama_resized_vocab", 51, 51, 2 * 51 * 64),
    ] {
        let (model, adapter) = (
            case_dir(case).join("config.json").display().to_string(),
            case_dir(case).join("adapter").display().to_string(),
        );
        let output = lora(&["audit", "--json", "--model", &model, &adapter]);
        assert_eq!(output.code, 0, "{case}: {}", output.out);
        let json = output.json();
        assert_eq!(json["overlay"]["embed_tokens"]["replaced"], embed, "{case}");
        assert_eq!(json["overlay"]["lm_head"]["replaced"], head, "{case}");
        assert_eq!(json["bytes"]["overlay"], bytes, "{case}");
    }
    // Against the model that it was resized from, three rows are past the vocabulary.
    let model = case_dir("base_llama")
        .join("config.json")
        .display()
        .to_string();
    let adapter = case_dir("llama_resized_vocab")
        .join("adapter")
        .display()
        .to_string();
    let output = lora(&["audit", "--model", &model, &adapter]);
    assert_eq!(output.code, 0, "{}", output.out);
    for table in ["embed_tokens", "lm_head"] {
        let line = format!("overlay of {table}: 48 rows replaced at most, 3 past the vocabulary");
        assert!(output.out.contains(&line), "{}", output.out);
    }
}

/// The k-th id takes the k-th row: any other order is another adapter.
#[test]
fn ids_in_another_order_are_seen() {
    let case = CaseCopy::of("llama_tokens_unsorted");
    assert_eq!(verify(&case.argument(), &[]).code, 0, "as recorded");
    case.edit_config(|config| config["trainable_token_indices"] = serde_json::json!([1, 3, 9]));
    let output = verify(&case.argument(), &[]);
    assert_eq!(output.code, 1);
    assert!(worst(&output.json(), "model.embed_tokens") > 1.0);
}

#[test]
fn a_table_that_is_not_the_recorded_one_is_seen() {
    for (tensor, path) in [
        ("embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ] {
        let case = CaseCopy::of("llama_modules_to_save");
        assert_eq!(verify(&case.argument(), &[]).code, 0, "as recorded");
        case.edit_adapter(tensor, |_, values| {
            values.iter_mut().for_each(|v| *v *= 1.02)
        });
        let output = verify(&case.argument(), &[]);
        assert_eq!(output.code, 1);
        let json = output.json();
        for other in ["model.embed_tokens", "lm_head"] {
            assert_eq!(
                worst(&json, other) > 1.0,
                other == path,
                "{other} by {tensor}"
            );
        }
    }
}

/// A case whose head is the embedding, its logits recorded: x times the table with the trained rows in their places.
#[test]
fn trained_rows_serve_a_tied_head() {
    let case = CaseCopy::of("llama_tokens_unsorted");
    case.edit_model(|config| config["tie_word_embeddings"] = true.into());
    let golden = case.path().join("golden.safetensors");
    let file = case.path().join("adapter/adapter_model.safetensors");
    let base = read_f32(&golden, "model.embed_tokens|w");
    let name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";
    let trained = read_f32(&file, name);
    let mut adapted = base.clone();
    for (place, id) in [9, 1, 3].into_iter().enumerate() {
        adapted[id * 32..][..32].copy_from_slice(&trained[place * 32..][..32]);
    }
    let x = read_f32(&golden, "model.layers.1.self_attn.q_proj|x");
    let logits = |table: &[f32]| -> Vec<f32> {
        let dot = |row: &[f32], of: &[f32]| row.iter().zip(of).map(|(a, b)| a * b).sum();
        let row = |row: &[f32]| {
            table
                .chunks(32)
                .map(|of| dot(row, of))
                .collect::<Vec<f32>>()
        };
        x.chunks(32).flat_map(row).collect()
    };
    let rows = x.len() / 32;
    case.add_golden("lm_head|x", &[rows, 32], &x);
    case.add_golden("lm_head|base", &[rows, 48], &logits(&base));
    case.add_golden("lm_head|out", &[rows, 48], &logits(&adapted));
    let output = verify(&case.argument(), &[]);
    assert_eq!(output.code, 0, "{}{}", output.out, output.err);
    let json = output.json();
    assert!(worst(&json, "lm_head") > 0.0);
    assert_eq!(json["cases"][0]["overlay"]["lm_head"]["replaced"], 3);
    case.edit_golden("lm_head|out", |_, values| values.swap(9, 1));
    assert_eq!(verify(&case.argument(), &[]).code, 1);
}

/// Rows that a saved table shares with the base model's are not replaced, once the base model's are known.
#[test]
fn the_base_model_beside_a_case_says_which_rows_changed() {
    let case = CaseCopy::of("llama_modules_to_save");
    let base = case_dir("base_llama").join("model.safetensors");
    for table in ["model.embed_tokens.weight", "lm_head.weight"] {
        case.edit_adapter(table, |_, values| {
            values.copy_from_slice(&read_f32(&base, table));
            values[7 * 32 + 5] += 1.0;
        });
    }
    std::fs::remove_file(case.path().join("golden.safetensors")).expect("file is removed");
    let replaced = |case: &str, more: &[&str]| {
        let json = verify(case, more).json();
        let overlay = &json["cases"][0]["overlay"];
        let rows = |table: &str| overlay[table]["replaced"].as_u64().expect("a number");
        (rows("embed_tokens"), rows("lm_head"))
    };
    assert_eq!(
        replaced(&case.argument(), &[]),
        (48, 48),
        "nothing to compare with"
    );
    let root = tempfile::tempdir().expect("a temporary folder");
    let beside = root.path().join("case");
    copy_folder(case.path(), &beside);
    copy_folder(&case_dir("base_llama"), &root.path().join("base_model"));
    let beside = beside.display().to_string();
    assert_eq!(replaced(&beside, &[]), (1, 1));
    let all = ["--row-diff-threshold", "1.5"];
    let json = verify(&beside, &all).json();
    assert!(json["cases"][0]["overlay"].is_null(), "{json}");
}

fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).expect("folder is made");
    for entry in std::fs::read_dir(from).expect("folder is there") {
        let path = entry.expect("entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            std::fs::copy(&path, &target).expect("file is copied");
        }
    }
}

#[test]
fn bad_token_cases_are_refused_in_audit_by_name() {
    for (case, reason) in [
        ("bad_token_beyond_vocab", "token-beyond-vocab"),
        ("bad_token_count", "token-count-mismatch"),
        ("bad_token_ids_missing", "token-ids-missing"),
        ("bad_token_negative", "config-trainable_token_indices"),
        ("bad_token_rows_missing", "token-rows-missing"),
        ("bad_modules_to_save_missing", "saved-module-missing"),
    ] {
        let (model, adapter) = (
            case_dir(case).join("config.json").display().to_string(),
            case_dir(case).join("adapter").display().to_string(),
        );
        let output = lora(&["audit", "--json", "--model", &model, &adapter]);
        assert_eq!(output.code, 1, "{case}");
        assert!(
            output.error_reasons().iter().any(|r| r == reason),
            "{case}: {}",
            output.out
        );
        assert_eq!(verify(&argument(case), &[]).code, 1, "{case}");
    }
}
