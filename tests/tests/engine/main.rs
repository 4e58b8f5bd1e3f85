//! The reference engine on whole models: against PEFT's logits, in mixed batches, while adapters come and go. Every body runs on the host, and on
//! a GPU where there is one.

mod merged;
mod mixed;
mod parity;
mod refusals;
mod serving;

use lora_runtime::config::BackendKind;
use lora_tests::{case_dir, has_cuda};
use mini_engine::{Engine, EngineOptions, Request, Response};
use std::path::Path;

/// Every recorded case that loads and carries the whole model's logits, with its base model.
pub(crate) const RECORDED: [(&str, &str); 8] = [
    ("base_llama", "llama_plain"),
    ("base_llama", "llama_rslora"),
    ("base_llama", "llama_patterns"),
    ("base_llama", "llama_all_linear"),
    ("base_llama", "llama_modules_to_save"),
    ("base_qwen3_moe", "qwen3_moe_params"),
    ("base_mixtral", "mixtral_params"),
    ("base_qwen3_5", "qwen3_5_linear_attn"),
];

/// The adapters that load on a base model, whether or not the whole model's logits were recorded.
pub(crate) fn adapters_of(base: &str) -> &'static [&'static str] {
    match base {
        "base_llama" => &[
            "llama_plain",
            "llama_rslora",
            "llama_patterns",
            "llama_all_linear",
            "llama_no_task_type",
            "llama_modules_to_save",
            "llama_tokens_unsorted",
        ],
        "base_qwen3_moe" => &[
            "qwen3_moe_params",
            "qwen3_moe_params_down_only",
            "qwen3_moe_v4_per_expert",
        ],
        "base_mixtral" => &["mixtral_params"],
        _ => &["qwen3_5_linear_attn"],
    }
}

pub(crate) const BASES: [&str; 4] = [
    "base_llama",
    "base_qwen3_moe",
    "base_mixtral",
    "base_qwen3_5",
];

pub(crate) fn options(backend: BackendKind) -> EngineOptions {
    EngineOptions {
        backend,
        slots: 8,
        max_rank: 16,
        max_rows: 64,
        cached_prompts: 16,
    }
}

/// An engine of this model with these cases' adapters registered.
pub(crate) fn engine(model: &Path, adapters: &[&str], options: EngineOptions) -> Engine {
    let mut engine = Engine::open(model, options).expect("the model loads");
    for case in adapters {
        register(&mut engine, case, case);
    }
    engine
}

pub(crate) fn register(engine: &mut Engine, name: &str, case: &str) {
    let dir = case_dir(case).join("adapter");
    engine.register(name, &dir).expect("the adapter loads");
}

/// A request that keeps its logits.
pub(crate) fn request(adapter: Option<&str>, prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        name: adapter.unwrap_or("base").to_owned(),
        adapter: adapter.map(str::to_owned),
        prompt: prompt.to_vec(),
        max_tokens,
        keep_logits: true,
    }
}

/// Serves requests together; the responses in the order of the requests.
pub(crate) fn serve(engine: &mut Engine, requests: &[Request]) -> Vec<Response> {
    for (at, request) in requests.iter().enumerate() {
        let name = format!("{at}");
        let numbered = Request {
            name,
            ..request.clone()
        };
        engine.submit(numbered).expect("is valid");
    }
    let mut responses = engine.run().expect("serves");
    let number = |response: &Response| response.request.name.parse::<usize>().expect("a number");
    responses.sort_by_key(number);
    responses
}

/// Runs a body on a GPU; says that it was skipped, and why, where there is none.
pub(crate) fn on_cuda(test: &str, body: impl FnOnce(BackendKind)) {
    if has_cuda(test) {
        body(BackendKind::Cuda);
    }
}
