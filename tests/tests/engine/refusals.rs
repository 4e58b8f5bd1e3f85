//! What the engine does not serve, it refuses by name.

use crate::merged::{read_model, write};
use crate::{engine, options, request};
use lora_runtime::config::BackendKind;
use lora_tests::case_dir;
use mini_engine::Engine;

#[test]
fn an_adapter_that_is_not_applied_is_refused_when_it_is_registered() {
    let mut engine = engine(
        &case_dir("base_llama"),
        &["llama_plain"],
        options(BackendKind::Host),
    );
    let dora = case_dir("llama_dora").join("adapter");
    let error = engine
        .register("dora", &dora)
        .expect_err("is DoRA")
        .to_string();
    assert!(error.contains("dora"), "{error}");
    let nan = case_dir("bad_nan").join("adapter");
    let error = engine
        .register("llama_plain", &nan)
        .expect_err("has a NaN")
        .to_string();
    assert!(error.contains("non-finite-weights"), "{error}");
    let request = request(Some("llama_plain"), &[1, 2], 1);
    engine.submit(request).expect("the earlier one stays");
    assert_eq!(engine.run().expect("serves").len(), 1);
}

#[test]
fn requests_for_what_is_not_there_are_refused() {
    let mut engine = engine(&case_dir("base_llama"), &[], options(BackendKind::Host));
    for (bad, word) in [
        (request(Some("nobody"), &[1], 1), "nobody"),
        (request(None, &[], 1), "empty"),
        (request(None, &[1, 48], 1), "48"),
    ] {
        let error = engine
            .submit(bad)
            .expect_err("cannot be served")
            .to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(engine.is_idle());
}

#[test]
fn a_weight_without_a_block_and_a_family_without_blocks_are_refused() {
    let mut model = read_model("base_llama");
    let bias = (vec![32], vec![0.5; 32]);
    model.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), bias);
    let dir = write("base_llama", &model);
    let error = Engine::open(dir.path(), options(BackendKind::Host)).expect_err("a bias is left");
    assert!(error.to_string().contains("q_proj.bias"), "{error}");
    model.clear();
    let dir = write("base_llama", &model);
    let error = Engine::open(dir.path(), options(BackendKind::Host)).expect_err("no weights");
    assert!(error.to_string().contains("embed_tokens"), "{error}");
    let phi = Engine::open(&case_dir("phi3_fused"), options(BackendKind::Host));
    let error = phi.expect_err("is Phi-3").to_string();
    assert!(error.contains("built in are llama"), "{error}");
}
