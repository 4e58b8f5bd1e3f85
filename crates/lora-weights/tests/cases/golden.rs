//! The pairs of an audit against what PEFT computed from the same files.

use crate::case::{Case, pool};
use half::bf16;
use lora_config::{GateUpOrder, StackedAxes};
use lora_weights::{AdapterStore, AuditedPair, ExpertProj, LoraTarget};
use std::collections::BTreeMap;

/// A pair's values.
struct Matrices {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
}

impl Matrices {
    fn read(store: &AdapterStore, pair: &AuditedPair) -> Self {
        let rank = pair.rank as usize;
        let mut a = vec![bf16::NAN; rank * pair.k_in];
        // B at a stride wider than the rank, as packing reads it.
        let stride = rank + 3;
        let mut b = vec![bf16::NAN; pair.n_out * stride];
        pair.source.read_a(store, &mut a);
        pair.source.read_b(store, &mut b, stride);
        let rows = b.chunks(stride).flat_map(|row| &row[..rank]);
        Self {
            b: rows.map(|v| v.to_f32()).collect(),
            a: a.iter().map(|v| v.to_f32()).collect(),
            rank,
        }
    }

    /// Element `(o, i)` of B A, and the sum of its terms' magnitudes.
    fn product(&self, o: usize, i: usize, k_in: usize) -> (f32, f32) {
        let terms = (0..self.rank).map(|k| self.b[o * self.rank + k] * self.a[k * k_in + i]);
        terms.fold((0.0, 0.0), |(sum, size), term| {
            (sum + term, size + term.abs())
        })
    }
}

/// A and B are each rounded to BF16, by half of 2^-8 at most.
fn close(got: f32, wanted: f32, size: f32) -> bool {
    (got - wanted).abs() <= size / 128.0 + 1e-5 * (1.0 + wanted.abs())
}

#[test]
fn pairs_give_the_outputs_that_peft_recorded() {
    let mut compared = 0;
    for case in Case::all() {
        let report = case.audit(&pool());
        if !report.ok() {
            continue;
        }
        let (golden, store) = (case.golden(), AdapterStore::open(&case.adapter()).unwrap());
        for pair in &report.pairs {
            let path = pair.path.strip_suffix(".weight").unwrap_or(&pair.path);
            let recorded = |what: &str| golden.get(&format!("{path}|{what}"));
            let (Some((shape, x)), Some((_, base)), Some((_, out))) =
                (recorded("x"), recorded("base"), recorded("out"))
            else {
                continue;
            };
            let matrices = Matrices::read(&store, pair);
            let (k, n) = (pair.k_in, pair.n_out);
            for row in 0..shape[0] {
                for o in 0..n {
                    let terms = (0..k).map(|i| {
                        let (product, size) = matrices.product(o, i, k);
                        let x = x[row * k + i];
                        (product * x, size * x.abs())
                    });
                    let (delta, size) = terms.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
                    let wanted = out[row * n + o] - base[row * n + o];
                    let (delta, size) = (pair.scale * delta, pair.scale.abs() * size);
                    assert!(
                        close(delta, wanted, size),
                        "{} {path} [{row}, {o}]: {delta} for {wanted}",
                        case.name
                    );
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared} modules compared");
}

#[test]
fn stacked_experts_give_the_weights_that_peft_adapted() {
    let mut compared = BTreeMap::new();
    for case in Case::all() {
        let report = case.audit(&pool());
        let (true, Ok(spec)) = (report.ok(), case.spec()) else {
            continue;
        };
        let (golden, store) = (case.golden(), AdapterStore::open(&case.adapter()).unwrap());
        for pair in &report.pairs {
            let (LoraTarget::Expert { n, proj }, Some(moe)) = (pair.target, &spec.moe) else {
                continue;
            };
            let recorded = |what: &str| golden.get(&format!("{}|{what}", pair.path));
            let (Some((shape, w)), Some((_, adapted))) = (recorded("w"), recorded("w_adapted"))
            else {
                continue;
            };
            let matrices = Matrices::read(&store, pair);
            for o in 0..pair.n_out {
                let row = match (proj, moe.gate_up) {
                    (ExpertProj::Down, _) | (ExpertProj::Gate, GateUpOrder::Concatenated) => o,
                    (ExpertProj::Up, GateUpOrder::Concatenated) => moe.expert_width + o,
                    (ExpertProj::Gate, GateUpOrder::Interleaved) => 2 * o,
                    (ExpertProj::Up, GateUpOrder::Interleaved) => 2 * o + 1,
                };
                for i in 0..pair.k_in {
                    let at = n * shape[1] * shape[2]
                        + match moe.stacked_axes {
                            StackedAxes::OutIn => row * shape[2] + i,
                            StackedAxes::InOut => i * shape[2] + row,
                        };
                    let (product, size) = matrices.product(o, i, pair.k_in);
                    let (delta, size) = (pair.scale * product, pair.scale.abs() * size);
                    let wanted = adapted[at] - w[at];
                    assert!(
                        close(delta, wanted, size),
                        "{} {} expert {n} {proj:?} [{o}, {i}]: {delta} for {wanted}",
                        case.name,
                        pair.path
                    );
                }
            }
            *compared.entry(case.name.clone()).or_insert(0) += 1;
        }
    }
    for name in [
        "llama4_params",
        "mixtral_params",
        "moe_layout_gpt_oss_019_0",
        "moe_layout_peft018",
        "moe_layout_peft018_square",
        "moe_layout_unsloth_marked",
        "qwen3_5_moe_mixed",
        "qwen3_moe_params",
        "qwen3_moe_params_down_only",
        "qwen3_moe_params_gate_up_only",
        "qwen3_moe_params_square",
        "qwen3_moe_v4_targets",
    ] {
        assert!(compared.contains_key(name), "{name} was not compared");
    }
}
