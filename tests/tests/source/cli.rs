//! `lora audit URL`.

use crate::{cases, id};
use lora_tests::peer::Peer;
use lora_tests::{CommandOutput, case_dir, index, lora};
use serde_json::Value;

fn audit(adapter: &str, case: &str, more: &[&str]) -> CommandOutput {
    let model = case_dir(case).join("config.json").display().to_string();
    let mut arguments = vec!["audit", "--json", "--model", &model, adapter];
    arguments.extend(more);
    lora(&arguments)
}

fn has_reason(json: &Value, reason: &str) -> bool {
    let findings = json["findings"].as_array().expect("a list");
    findings.iter().any(|finding| finding["reason"] == reason)
}

#[test]
fn a_url_is_audited_without_a_byte_of_its_tensors_and_says_so() {
    let peer = Peer::serving(&cases());
    let output = audit(&peer.url(&id("llama_plain")), "llama_plain", &[]);
    let json = output.json();
    assert_eq!(
        (output.code, &json["ok"]),
        (0, &Value::Bool(true)),
        "{}",
        output.out
    );
    assert!(has_reason(&json, "values-unread"), "{}", output.out);

    let local = audit(
        &case_dir("llama_plain")
            .join("adapter")
            .display()
            .to_string(),
        "llama_plain",
        &[],
    )
    .json();
    for key in ["applied", "ignored", "tensors", "modules", "bytes"] {
        assert_eq!(json[key], local[key], "{key}");
    }
    let file = std::fs::read(case_dir("llama_plain").join("adapter/adapter_model.safetensors"))
        .expect("is there");
    let header = 8 + u64::from_le_bytes(*file.first_chunk().expect("a length")) as usize;
    for sent in peer
        .sent()
        .iter()
        .filter(|sent| sent.path.ends_with(".safetensors"))
    {
        assert!(
            sent.range.end <= header,
            "{sent:?} is past the header's {header} bytes"
        );
    }

    let text = lora(&[
        "audit",
        &peer.url(&id("llama_plain")),
        "--model",
        &case_dir("llama_plain")
            .join("config.json")
            .display()
            .to_string(),
    ]);
    assert!(text.out.contains("WARN[values-unread]"), "{}", text.out);
    assert!(
        text.out.contains("loads; applied 28 of 28 tensors"),
        "{}",
        text.out
    );
}

#[test]
fn fetched_values_are_looked_at() {
    let peer = Peer::serving(&cases());
    let url = peer.url(&id("bad_nan"));
    let header = audit(&url, "bad_nan", &[]);
    assert_eq!(
        (header.code, header.error_reasons().len()),
        (0, 0),
        "{}",
        header.out
    );
    let fetched = audit(&url, "bad_nan", &["--fetch"]);
    assert_eq!(
        (fetched.code, fetched.error_reasons()),
        (1, vec!["non-finite-weights".to_owned()])
    );
    assert!(!has_reason(&fetched.json(), "values-unread"));
}

#[test]
fn every_case_is_to_a_url_what_it_is_to_a_folder() {
    let peer = Peer::serving(&cases());
    let mut loaded = 0;
    for case in index() {
        let more = ["--enable", "all", "--experts"];
        let folder = case_dir(&case.name).join("adapter").display().to_string();
        let local = audit(&folder, &case.name, &more);
        let remote = audit(
            &peer.url(&id(&case.name)),
            &case.name,
            &[&more[..], &["--fetch"]].concat(),
        );
        assert_eq!(
            remote.code, local.code,
            "{}: {}{}",
            case.name, remote.out, local.out
        );
        let (remote, local) = (remote, local);
        if local.code == 0 {
            let (remote, local) = (remote.json(), local.json());
            for key in [
                "ok", "applied", "ignored", "tensors", "findings", "modules", "bytes",
            ] {
                assert_eq!(remote[key], local[key], "{}: {key}", case.name);
            }
            loaded += 1;
        } else {
            // Of files that cannot be read the first is named, and of a folder all.
            let known = local.error_reasons();
            let reasons = remote.error_reasons();
            assert!(
                !reasons.is_empty() && reasons.iter().all(|reason| known.contains(reason)),
                "{}: {reasons:?}, {known:?}",
                case.name
            );
        }
    }
    assert!(loaded >= 30, "{loaded} cases load");
}

#[test]
fn a_peer_that_is_not_there_and_an_adapter_that_it_has_not_are_findings() {
    let peer = Peer::serving(&cases());
    let absent = audit(&peer.url("no/such/adapter"), "llama_plain", &[]);
    assert_eq!(
        (absent.code, absent.error_reasons()),
        (1, vec!["missing-config-file".to_owned()])
    );
    let address = peer.address();
    drop(peer);
    let gone = audit(
        &format!("http://{address}/a"),
        "llama_plain",
        &["--timeout", "2"],
    );
    assert_eq!(
        (gone.code, gone.error_reasons()),
        (1, vec!["source-failed".to_owned()])
    );
    assert!(
        gone.out
            .contains(&format!("http://{address}/a/adapter_config.json")),
        "{}",
        gone.out
    );
    let odd = audit("gopher://host/a", "llama_plain", &[]);
    assert_eq!(
        (odd.code, odd.error_reasons()),
        (1, vec!["source-failed".to_owned()])
    );
    assert_eq!(
        audit("http://host/a", "llama_plain", &["--timeout", "0"]).code,
        2
    );
}

#[test]
fn weights_in_another_format_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = case_dir("llama_plain").join("adapter/adapter_config.json");
    std::fs::copy(config, folder.path().join("adapter_config.json")).expect("is copied");
    std::fs::write(folder.path().join("adapter_model.bin"), b"PK").expect("is written");
    let peer = Peer::serving(folder.path());
    let output = audit(&format!("http://{}", peer.address()), "llama_plain", &[]);
    assert_eq!(
        (output.code, output.error_reasons()),
        (1, vec!["missing-weights-file".to_owned()])
    );
    assert!(
        output.out.contains("but adapter_model.bin"),
        "{}",
        output.out
    );
}

#[test]
fn a_file_url_is_a_source_like_every_other() {
    let adapter = case_dir("llama_rslora")
        .join("adapter")
        .canonicalize()
        .expect("is there");
    let output = audit(
        &format!("file://{}", adapter.display()),
        "llama_rslora",
        &["--fetch"],
    );
    assert_eq!(output.code, 0, "{}", output.out);
}
