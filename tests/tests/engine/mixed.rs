//! What is served together has the bits of what is served alone.

use crate::merged::{Tensors, read_model, write};
use crate::{BASES, adapters_of, engine, on_cuda, options, request, serve};
use lora_runtime::config::BackendKind;
use lora_tests::case_dir;
use mini_engine::{EngineOptions, Request, Response};
use std::collections::BTreeSet;

/// Two prompts for the base model and for every adapter of it.
fn requests(base: &str) -> Vec<Request> {
    let prompts: [&[u32]; 2] = [&[5, 17, 3, 40, 8], &[30, 2, 2, 11, 46, 7, 19, 1]];
    let adapters = adapters_of(base).iter().map(|adapter| Some(*adapter));
    let everyone = std::iter::once(None).chain(adapters);
    let both = everyone.flat_map(|adapter| prompts.map(|prompt| request(adapter, prompt, 6)));
    both.collect()
}

fn bits(response: &Response) -> (Vec<u32>, Vec<u32>) {
    let logits = response.logits.iter().flatten();
    (
        response.tokens.clone(),
        logits.map(|logit| logit.to_bits()).collect(),
    )
}

/// Serves each request by itself, then all together in steps of different sizes: prompts are cut elsewhere and rows have other neighbours.
fn together_equals_alone(backend: BackendKind) {
    for base in BASES {
        let requests = requests(base);
        let engine = |max_rows: u32| {
            let options = EngineOptions {
                max_rows,
                ..options(backend)
            };
            engine(&case_dir(base), adapters_of(base), options)
        };
        let mut alone = engine(64);
        let alone: Vec<_> = requests
            .iter()
            .map(|request| bits(&serve(&mut alone, std::slice::from_ref(request))[0]))
            .collect();
        let answers: BTreeSet<_> = alone.iter().map(|(_, logits)| logits).collect();
        assert_eq!(
            answers.len(),
            requests.len(),
            "{base}: every answer is its own"
        );
        for max_rows in [16, 23, 64] {
            let together = serve(&mut engine(max_rows), &requests);
            for ((request, alone), response) in requests.iter().zip(&alone).zip(&together) {
                let name = &request.name;
                assert!(*alone == bits(response), "{base}, {max_rows} rows: {name}");
            }
        }
    }
}

#[test]
fn a_mixed_batch_gives_every_request_the_bits_of_serving_it_alone() {
    together_equals_alone(BackendKind::Host);
}

#[test]
fn a_mixed_batch_gives_every_request_the_bits_of_serving_it_alone_on_a_gpu() {
    on_cuda("mixed batches on a GPU", together_equals_alone);
}

/// The first step of a mixed batch has rows of the base model and of every adapter.
#[test]
fn one_step_serves_the_base_model_and_every_adapter() {
    let adapters = adapters_of("base_llama");
    let mut engine = engine(
        &case_dir("base_llama"),
        adapters,
        options(BackendKind::Host),
    );
    for request in requests("base_llama") {
        engine.submit(request).expect("is valid");
    }
    engine.step().expect("serves");
    let slots: BTreeSet<i32> = engine.last_slots().iter().copied().collect();
    assert_eq!(slots.len(), adapters.len() + 1, "{slots:?}");
}

/// Checkpoints before transformers 5 have a tensor for each projection of each expert.
#[test]
fn experts_stored_one_by_one_are_those_stored_stacked() {
    for (base, block, projections) in [
        (
            "base_qwen3_moe",
            "mlp",
            ["gate_proj", "up_proj", "down_proj"],
        ),
        ("base_mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
    ] {
        let dir = write(base, &one_by_one(&read_model(base), block, projections));
        let mut engines = [dir.path(), &case_dir(base)]
            .map(|model| engine(model, adapters_of(base), options(BackendKind::Host)));
        let requests = requests(base);
        let [apart, stacked] = engines.each_mut().map(|engine| serve(engine, &requests));
        for (apart, stacked) in apart.iter().zip(&stacked) {
            assert!(bits(apart) == bits(stacked), "{base}");
        }
    }
}

/// The same weights with the experts' tensors cut apart and named as before transformers 5.
fn one_by_one(model: &Tensors, block: &str, [gate, up, down]: [&str; 3]) -> Tensors {
    let mut apart = Tensors::new();
    for (name, (shape, values)) in model {
        let name = name.replace(".mlp.", &format!(".{block}."));
        let &[experts, rows, columns] = shape.as_slice() else {
            apart.insert(name, (shape.clone(), values.clone()));
            continue;
        };
        let (prefix, stacked) = name.rsplit_once('.').expect("a path");
        let projections: &[&str] = match stacked {
            "gate_up_proj" => &[gate, up],
            _ => &[down],
        };
        let rows = rows / projections.len();
        for (at, values) in values.chunks_exact(rows * columns).enumerate() {
            let (expert, projection) = (at / projections.len(), at % projections.len());
            let name = format!("{prefix}.{expert}.{}.weight", projections[projection]);
            apart.insert(name, (vec![rows, columns], values.to_vec()));
        }
        assert_eq!(values.len(), experts * projections.len() * rows * columns);
    }
    apart
}
