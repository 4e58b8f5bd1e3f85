//! Adapters come and go while requests run.

use crate::{adapters_of, engine, on_cuda, options, register, request, serve};
use lora_runtime::config::BackendKind;
use lora_runtime::weights::BASE_ADAPTER_ID;
use lora_tests::case_dir;
use mini_engine::{EngineOptions, Request, Response};

const PROMPT: [u32; 6] = [9, 33, 4, 21, 14, 2];

fn tokens(responses: &[Response]) -> Vec<&[u32]> {
    let tokens = responses.iter().map(|response| response.tokens.as_slice());
    tokens.collect()
}

fn few_slots_serve_many_adapters(backend: BackendKind) {
    for base in ["base_llama", "base_qwen3_moe"] {
        let adapters = adapters_of(base);
        let lengths = [3, 9, 5, 7];
        let requests: Vec<Request> = (0..4 * adapters.len())
            .map(|at| {
                request(
                    Some(adapters[at % adapters.len()]),
                    &PROMPT,
                    lengths[at % 4],
                )
            })
            .collect();
        let mut roomy = engine(&case_dir(base), adapters, options(backend));
        let wanted = serve(&mut roomy, &requests);
        let two_slots = EngineOptions {
            slots: 2,
            ..options(backend)
        };
        let mut tight = engine(&case_dir(base), adapters, two_slots);
        let got = serve(&mut tight, &requests);
        assert_eq!(tokens(&wanted), tokens(&got), "{base}");
        assert!(tight.runtime().metrics().evictions > 0, "{base}");
    }
}

#[test]
fn adapters_that_take_turns_in_two_slots_give_the_tokens_of_a_slot_each() {
    few_slots_serve_many_adapters(BackendKind::Host);
}

#[test]
fn adapters_that_take_turns_in_two_slots_give_the_tokens_of_a_slot_each_on_a_gpu() {
    on_cuda("two slots on a GPU", few_slots_serve_many_adapters);
}

#[test]
fn a_request_that_runs_keeps_its_weights_while_the_next_gets_newer_ones_of_that_name() {
    let alone = |case: &str| {
        let mut engine = engine(&case_dir("base_llama"), &[case], options(BackendKind::Host));
        serve(&mut engine, &[request(Some(case), &PROMPT, 8)]).remove(0)
    };
    let (old, new) = (alone("llama_plain"), alone("llama_rslora"));
    let mut engine = engine(&case_dir("base_llama"), &[], options(BackendKind::Host));
    register(&mut engine, "adapter", "llama_plain");
    let request = request(Some("adapter"), &PROMPT, 8);
    engine.submit(request.clone()).expect("is valid");
    engine.step().expect("serves");
    register(&mut engine, "adapter", "llama_rslora");
    engine.submit(request).expect("is valid");
    let responses = engine.run().expect("serves");
    assert_eq!(tokens(&responses), [old.tokens, new.tokens]);
    assert_ne!(responses[0].adapter_id, responses[1].adapter_id);
    assert_eq!(
        engine.runtime().report().adapters.len(),
        1,
        "the older one has left its slot"
    );
}

#[test]
fn cached_prompts_serve_the_same_weights_alone() {
    for base in ["base_llama", "base_qwen3_5"] {
        let case = adapters_of(base)[0];
        let mut engine = engine(&case_dir(base), &[case], options(BackendKind::Host));
        let ask = |adapter: Option<&str>, prompt: &[u32]| Request {
            keep_logits: false,
            ..request(adapter, prompt, 5)
        };
        let mut served = |request| serve(&mut engine, &[request]).remove(0);
        let first = served(ask(Some(case), &PROMPT));
        let again = served(ask(Some(case), &PROMPT));
        assert_eq!(
            (first.cached_tokens, again.cached_tokens),
            (0, PROMPT.len() - 1)
        );
        assert_eq!(first.tokens, again.tokens, "{base}");

        // A longer prompt starts from the shorter one's; the base model and other weights start from nothing.
        let longer: Vec<u32> = PROMPT.into_iter().chain([7, 7]).collect();
        assert_eq!(
            served(ask(Some(case), &longer)).cached_tokens,
            PROMPT.len() - 1
        );
        let unadapted = served(ask(None, &PROMPT));
        assert_eq!(
            (unadapted.cached_tokens, unadapted.adapter_id),
            (0, BASE_ADAPTER_ID)
        );
        register(&mut engine, case, case);
        let newer = serve(&mut engine, &[ask(Some(case), &PROMPT)]).remove(0);
        assert_eq!(
            (newer.cached_tokens, newer.tokens),
            (0, first.tokens),
            "{base}"
        );
    }
}
