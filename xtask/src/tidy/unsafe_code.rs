//! `unsafe` stands only in the modules that touch the driver, raw host memory or the mapped file, and where an example shows
//! how an engine hands its own pointers over; every use says why it is sound.

use super::Violation;
use crate::workspace::{RustFile, Workspace};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::Visit;

/// Files, and folders by a trailing slash, that may hold `unsafe`.
const ALLOWED: [&str; 7] = [
    "crates/lora-weights/src/store/",
    "crates/lora-kernels/examples/",
    "crates/lora-kernels/src/backend.rs",
    "crates/lora-kernels/src/buffer.rs",
    "crates/lora-kernels/src/view.rs",
    "crates/lora-kernels/src/host/",
    "crates/lora-kernels/src/cuda/",
];

/// A `SAFETY:` comment shorter than this cannot discharge anything.
const SHORTEST_SAFETY: usize = 24;

/// What follows an `unsafe` keyword.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// A block or an implementation: it claims that an obligation is met.
    Claim,
    /// A declaration: it states an obligation.
    Declaration,
}

/// Every `unsafe` is in an allowed module; claims have a `SAFETY:` comment, declarations a `# Safety` section.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in &workspace.rust {
        let mut uses = Vec::new();
        collect(file.tokens.clone(), &mut uses);
        let allowed = ALLOWED.iter().any(|place| match place.ends_with('/') {
            true => file.path.starts_with(place),
            false => file.path == *place,
        });
        for (line, what) in uses {
            if !allowed {
                found.push(Violation::at(
                    &file.path,
                    line,
                    "unsafe outside the modules that may hold it",
                ));
            } else if what == Use::Claim && !has_safety_comment(&file.text, line) {
                found.push(Violation::at(
                    &file.path,
                    line,
                    "unsafe without a SAFETY: comment that says why it is sound",
                ));
            }
        }
        found.extend(undocumented_functions(file));
    }
    found
}

/// Every `unsafe` keyword of a token stream with its line, macro bodies included.
fn collect(tokens: TokenStream, uses: &mut Vec<(usize, Use)>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Group(group) => collect(group.stream(), uses),
            TokenTree::Ident(ident) if ident == "unsafe" => {
                let what = match tokens.peek() {
                    Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                        Use::Claim
                    }
                    Some(TokenTree::Ident(next)) if next == "impl" => Use::Claim,
                    _ => Use::Declaration,
                };
                uses.push((ident.span().start().line, what));
            }
            _ => {}
        }
    }
}

/// Whether the comment right above the statement on `line` (1-based), or at its end, is a `SAFETY:` one.
fn has_safety_comment(text: &str, line: usize) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let above = lines[..line - 1].iter().rev();
    // A statement may begin some lines above its `unsafe`; a comment above the statement counts.
    let block: Vec<&str> = above
        .skip_while(|l| !l.starts_with("//") && !l.is_empty() && !l.ends_with([';', '}', '{']))
        .take_while(|l| l.starts_with("//") || l.starts_with("#["))
        .copied()
        .collect();
    let comment: String = block
        .iter()
        .rev()
        .map(|l| l.trim_start_matches('/'))
        .collect();
    comment
        .split_once("SAFETY:")
        .is_some_and(|(_, why)| why.trim().len() >= SHORTEST_SAFETY)
}

/// `unsafe fn` items without a `# Safety` section.
fn undocumented_functions(file: &RustFile) -> Vec<Violation> {
    struct Functions<'a>(&'a str, Vec<Violation>);
    impl Functions<'_> {
        fn look(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature) {
            let documented = attributes
                .iter()
                .any(|a| doc_text(a).is_some_and(|d| d.trim() == "# Safety"));
            if is_unsafe(signature) && !documented {
                let message = format!("unsafe fn {} has no `# Safety` section", signature.ident);
                self.1.push(Violation::at(
                    self.0,
                    signature.ident.span().start().line,
                    message,
                ));
            }
        }
    }
    impl<'ast> Visit<'ast> for Functions<'_> {
        fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
            self.look(&item.attrs, &item.sig);
            syn::visit::visit_item_fn(self, item);
        }
        fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
            self.look(&item.attrs, &item.sig);
            syn::visit::visit_impl_item_fn(self, item);
        }
        fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
            self.look(&item.attrs, &item.sig);
            syn::visit::visit_trait_item_fn(self, item);
        }
        // A trait's implementation documents nothing of its own: the trait states the obligation.
        fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
            if item.trait_.is_none() {
                syn::visit::visit_item_impl(self, item);
            }
        }
    }
    let mut functions = Functions(&file.path, Vec::new());
    functions.visit_file(&file.tree);
    functions.1
}

fn is_unsafe(signature: &syn::Signature) -> bool {
    matches!(signature.safety, syn::Safety::Unsafe(_))
}

/// The text of a doc attribute.
fn doc_text(attribute: &syn::Attribute) -> Option<String> {
    let syn::Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    if !pair.path.is_ident("doc") {
        return None;
    }
    match &pair.value {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(text),
            ..
        }) => Some(text.value()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::planted;

    const PLACE: &str = "crates/lora-kernels/src/host/memory.rs";

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&planted::workspace(&[(path, text)]))
            .into_iter()
            .map(|v| v.message)
            .collect()
    }

    #[test]
    fn unsafe_outside_its_modules_is_found_in_macros_too() {
        let block = "fn f(p: *const u8) -> u8 {\n // SAFETY: p is valid for reads, the caller says.\n unsafe { *p }\n}";
        assert!(messages("crates/lora-weights/src/pack.rs", block)[0].contains("outside"));
        let hidden = "macro_rules! m { () => { unsafe { f() } } }";
        assert!(messages("crates/lora-weights/src/pack.rs", hidden)[0].contains("outside"));
        assert!(messages(PLACE, block).is_empty());
    }

    #[test]
    fn unsafe_block_without_a_reason_is_found() {
        let bare = "fn f(p: *const u8) -> u8 {\n unsafe { *p }\n}";
        assert!(messages(PLACE, bare)[0].contains("SAFETY"));
        let boilerplate = "fn f(p: *const u8) -> u8 {\n // SAFETY: ffi\n unsafe { *p }\n}";
        assert!(messages(PLACE, boilerplate)[0].contains("SAFETY"));
        let of_another = "fn f(p: *const u8) -> u8 {\n // SAFETY: p is valid for reads, the caller says.\n let a = 1;\n unsafe { *p }\n}";
        assert!(messages(PLACE, of_another)[0].contains("SAFETY"));
    }

    #[test]
    fn comment_above_the_whole_statement_counts() {
        let split = "fn f(p: *const u8) -> u8 {\n // SAFETY: p is valid for reads, the caller says.\n let a =\n  unsafe { *p };\n a\n}";
        assert!(messages(PLACE, split).is_empty());
    }

    #[test]
    fn unsafe_function_without_a_safety_section_is_found() {
        assert!(messages(PLACE, "/// Reads.\npub unsafe fn read() {}")[0].contains("# Safety"));
        assert!(
            messages(
                PLACE,
                "/// Reads.\n///\n/// # Safety\n/// None.\npub unsafe fn read() {}"
            )
            .is_empty()
        );
    }

    #[test]
    fn function_pointer_types_claim_nothing() {
        assert!(messages(PLACE, "type F = unsafe extern \"C\" fn(u32) -> u32;").is_empty());
    }
}
