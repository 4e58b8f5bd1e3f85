//! The audit on real adapter folders: what loads, what is refused and why, and that the pairs it finds are the delta PEFT computes.

mod case;
mod golden;

use case::{Case, NOT_APPLIED, REFUSED, pool, show};
use lora_weights::{AuditedPair, audit_manifest};
use serde_json::Value;
use std::collections::BTreeMap;

#[test]
fn every_case_that_this_workspace_applies_loads_and_loses_no_tensor() {
    let mut loaded = 0;
    for case in Case::all() {
        let listed = |table: &[(&str, &str)]| table.iter().any(|(name, _)| *name == case.name);
        let mut pool = pool();
        pool.policy.accept_bare_names = case.name == "name_no_prefix";
        let report = case.audit(&pool);
        let wanted = match case.expect() {
            "ok" | "ok_ignore_extra" | "ok_warn_no_effect" | "ok_warn_renamed" | "token_rows"
            | "full_weights" => !listed(&NOT_APPLIED),
            _ => false,
        };
        assert_eq!(report.ok(), wanted, "{}: {}", case.name, show(&report));
        if wanted {
            assert_eq!(
                report.applied + report.ignored.len(),
                report.tensors,
                "{}",
                case.name
            );
            loaded += 1;
        }
    }
    assert!(loaded >= 35, "{loaded} cases load");
}

#[test]
fn every_case_that_is_not_applied_is_refused_by_name() {
    let cases: BTreeMap<String, Case> = Case::all()
        .into_iter()
        .map(|case| (case.name.clone(), case))
        .collect();
    for (name, reason) in NOT_APPLIED {
        let report = cases[name].audit(&pool());
        let first = report
            .errors()
            .next()
            .map(|finding| finding.reason.as_str());
        assert_eq!(first, Some(reason), "{name}: {}", show(&report));
    }
}

#[test]
fn every_damaged_case_is_refused_for_what_is_wrong_with_it() {
    let mut refusals: Vec<Case> = Case::all();
    refusals.retain(|case| REFUSED.iter().any(|(name, _)| *name == case.name));
    assert_eq!(refusals.len(), REFUSED.len());
    for case in refusals {
        let (_, reason) = REFUSED.iter().find(|(name, _)| *name == case.name).unwrap();
        let mut pool = pool();
        pool.policy.overlays = *reason != "overlay-unapplied";
        let report = case.audit(&pool);
        let found = report.errors().any(|finding| finding.reason == *reason);
        assert!(found, "{}: {}", case.name, show(&report));
    }
    let unlisted = Case::all().into_iter().filter(|case| {
        case.expect() == "refuse" && !REFUSED.iter().any(|(name, _)| *name == case.name)
    });
    let unlisted: Vec<String> = unlisted.map(|case| case.name).collect();
    assert_eq!(unlisted, Vec::<String>::new());
}

#[test]
fn a_header_alone_gives_every_finding_but_those_about_values() {
    let about_values = ["non-finite-weights", "no-effect", "tied-lora-mismatch"];
    let mut compared = 0;
    for case in Case::all() {
        let (Some(manifest), Ok(spec)) = (case.manifest(), case.spec()) else {
            continue;
        };
        let options = Default::default();
        let header = audit_manifest(&manifest, &options, &spec, &pool());
        let whole = case.audit(&pool());
        assert!(whole.values_read && !header.values_read);
        let mut wanted = whole.findings.clone();
        wanted.retain(|finding| !about_values.contains(&&*finding.reason));
        let mut found = header.findings.clone();
        found.retain(|finding| finding.reason != "values-unread");
        assert_eq!(found.len() + 1, header.findings.len(), "{}", case.name);
        assert_eq!(found, wanted, "{}", case.name);
        assert_eq!(header.pairs, whole.pairs, "{}", case.name);
        compared += 1;
    }
    assert!(compared >= 90, "{compared} cases have a header");
}

#[test]
fn warnings_say_what_a_person_should_know() {
    for case in Case::all() {
        let report = case.audit(&pool());
        let warned = |reason: &str| report.warnings().any(|finding| finding.reason == reason);
        match case.expect() {
            "ok_warn_no_effect" => assert!(warned("no-effect"), "{}", case.name),
            "ok_warn_renamed" => assert!(warned("renamed"), "{}", case.name),
            "ok_ignore_extra" => {
                assert!(warned("ignored-extra"), "{}", case.name);
                assert!(!report.ignored.is_empty());
            }
            _ => {}
        }
        if case.name == "llama_pattern_order" {
            assert!(warned("pattern-overlap"));
        }
    }
}

#[test]
fn ambiguous_stacked_experts_load_once_the_caller_says_how_they_lie() {
    use lora_config::LoraBLayout;
    use lora_weights::StackedLayout;
    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "moe_layout_square_no_version")
        .unwrap();
    let mut pool = pool();
    pool.policy.stacked_layout = Some(StackedLayout::AIn);
    assert_eq!(
        case.audit(&pool).errors().count(),
        2,
        "the order is still open on both layers"
    );
    pool.policy.stacked_order = Some(LoraBLayout::RankMajor);
    assert!(case.audit(&pool).ok());
}

#[test]
fn ranks_and_scales_are_those_that_peft_used() {
    let mut compared = 0;
    for case in Case::all() {
        let report = case.audit(&pool());
        if !report.ok() {
            continue;
        }
        for module in case.json["modules"].as_array().unwrap() {
            let path = match module["parameter"].as_str() {
                Some(parameter) => format!("{}.{parameter}", module["module"].as_str().unwrap()),
                None => module["module"].as_str().unwrap().to_owned(),
            };
            let of_module = |pair: &&AuditedPair| pair.path == path;
            let pairs: Vec<&AuditedPair> = report.pairs.iter().filter(of_module).collect();
            let table = path.ends_with("embed_tokens") || path.ends_with("lm_head");
            assert!(!pairs.is_empty() || table, "{}: {path}", case.name);
            for pair in pairs {
                assert_eq!(
                    u64::from(pair.rank),
                    module["r"].as_u64().unwrap(),
                    "{path}"
                );
                let scale = module["scaling"].as_f64().unwrap() as f32;
                assert_eq!(pair.scale, scale, "{}: {path}", case.name);
                compared += 1;
            }
        }
    }
    assert!(compared > 300, "{compared} pairs compared");
}

#[test]
fn a_report_is_json_of_a_fixed_shape() {
    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "qwen3_moe_params")
        .unwrap();
    let json: Value = serde_json::to_value(case.audit(&pool())).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["applied"], 16);
    assert_eq!(json["tensors"], 16);
    assert_eq!(json["ignored"], serde_json::json!([]));
    let modules = json["modules"].as_array().unwrap();
    assert_eq!(
        modules[0],
        serde_json::json!({"layer": 0, "module": "self_attn.q_proj", "expert": null, "rank": 2, "scale": 2.0})
    );
    let expert = modules
        .iter()
        .find(|m| m["module"] == "mlp.experts.up_proj")
        .unwrap();
    assert_eq!(expert["expert"], 0);
    for bytes in ["slot", "expert"] {
        assert!(json["bytes"][bytes].as_u64().unwrap() > 0);
    }
    assert_eq!(json["bytes"]["overlay"], 0);

    let case = Case::all()
        .into_iter()
        .find(|c| c.name == "bad_nan")
        .unwrap();
    let json: Value = serde_json::to_value(case.audit(&pool())).unwrap();
    assert_eq!(json["ok"], false);
    let finding = &json["findings"][0];
    assert_eq!(finding["level"], "error");
    assert_eq!(finding["reason"], "non-finite-weights");
    assert!(
        finding["tensor"]
            .as_str()
            .unwrap()
            .ends_with("lora_A.weight")
    );
    assert!(finding["message"].is_string());
}
